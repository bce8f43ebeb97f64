# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of trainers: exact counts and gradients, bit-exact continuation, correct published weights.

Subclass it as `TestMine(TrainerSuite)` and name the component. The model is a tiny Qwen3 made from a seed. Tests
compare results that every trainer reports: metrics, the gradient norm, and published bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_core.api.batch import Ragged, RowBatch
from relax_core.api.component import Chosen
from relax_core.api.errors import RelaxError
from relax_core.api.trainer import Chunk, OptimizerSpec, Trainer, TrainerSpec, UpdateOutcome, UpdateResult
from relax_core.api.weights import Manifest, Version
from relax_core.learn.counts import count
from relax_core.testing.suite import Suite
from relax_core.testing.trainer_fixture import VOCAB, InMemory, Reinforce, make_rows, with_values

FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of number formats in safetensors files."""


def tiny_model(
    directory: Path, seed: int = 0, vocab_size: int = VOCAB, dtype: str = "float32", key_value_heads: int = 1,
    layers: int = 2,
) -> str:  # fmt: skip
    """Save a Qwen3 of a few thousand random parameters as a Hugging Face folder; equal seeds give equal models."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=key_value_heads, head_dim=8,
        intermediate_size=32, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)
    return str(directory)


class TrainerSuite(Suite):
    """The suite of a trainer; a subclass sets `component`."""

    kind: ClassVar[str] = "trainer"
    slow_modules: ClassVar[tuple[str, ...]] = ("numpy", "torch", "transformers", "transformers.modeling_utils")
    deadline_s: ClassVar[float] = 120.0
    tolerance: ClassVar[float] = 1e-5
    """Largest relative difference of losses and norms that are computed in a different order."""
    rounding: ClassVar[float] = 1e-5
    """Largest absolute difference of log-probs that are computed in a different order."""
    dtype: ClassVar[str] = "float32"
    """`[model] dtype` of all tests."""
    ranks: ClassVar[int] = 1
    """Number of rank processes; several ranks are tested as one trainer."""
    algorithm: ClassVar[Chosen] = Chosen("algorithm", "reinforce")
    transport: ClassVar[Chosen] = Chosen("weight-transport", "in-memory")

    # -- building -----------------------------------------------------------------------------------------------

    @classmethod
    def make(cls) -> Any:
        """Make a new instance, which runs on several processes if `ranks` is above 1."""
        if cls.ranks == 1:
            return super().make()
        from relax_core.testing.trainer_ranks import RankedTrainer

        return RankedTrainer(cls.target(), cls.options, cls.ranks)  # type: ignore[arg-type]

    @classmethod
    def start(cls, trainer: Trainer, folder: str, **changes: Any) -> Trainer:
        """Start a trainer with the suite's algorithm and transport; `changes` replace fields of the TrainerSpec."""
        transports: dict[str, InMemory] = {}

        def build(chosen: Chosen) -> Any:
            if chosen.kind == "algorithm":
                return Reinforce(chosen.options)
            return transports.setdefault(chosen.name, InMemory())

        trainer.build = build
        spec = TrainerSpec(
            {"path": folder, "dtype": cls.dtype}, cls.algorithm, OptimizerSpec(1e-2), seed=1, deterministic=True
        )
        return started(trainer, replace(spec, **changes))

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        return tiny_model(tmp_path_factory.mktemp("model"), dtype=self.dtype)

    @pytest.fixture
    def trainer(self, folder: str) -> Iterator[Trainer]:
        with self.running(folder) as trainer:
            yield trainer

    @contextmanager
    def running(self, folder: str, **changes: Any) -> Iterator[Trainer]:
        trainer = self.start(self.make(), folder, **changes)
        try:
            yield trainer
        finally:
            trainer.stop()

    @pytest.fixture(scope="class")
    def first_step(self, folder: str) -> tuple[UpdateResult, str]:
        """Return the result of one plain step and the fingerprint of its weights, as a reference for many tests."""
        with self.running(folder) as trainer:
            return self.step(trainer, 0, make_rows()), self.fingerprint(trainer, 1)

    @pytest.fixture(scope="class")
    def by_format(self, folder: str) -> dict[str, tuple[UpdateResult, Manifest]]:
        """Return the result of the same step and the manifest of its weights, by number format of the engines."""
        made = {}
        for engines in FORMATS:
            with self.running(folder, publish_dtype=engines) as trainer:
                result = self.step(trainer, 0, make_rows())
                made[engines] = result, trainer.publish(Version("actor", 0, 1), self.transport, "")
        return made

    @classmethod
    def exercise(cls, component: Any) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            trainer = cls.start(component, tiny_model(Path(directory), dtype=cls.dtype))
            result = cls.step(trainer, 0, make_rows())
            fingerprint = cls.fingerprint(trainer, 1)
            trainer.stop()
        return str(result.outcome), result.grad_norm, fingerprint

    @staticmethod
    def step(
        trainer: Trainer, step: int, rows: RowBatch, *, budget: int = 0, nominal: Mapping[str, float] | None = None
    ) -> UpdateResult:
        """Train a step of one update. `nominal`: counts that divide the loss at first (default: the true counts)."""
        trainer.begin_step(Version("actor", 0, step))
        return update(trainer, [chunk(trainer, rows, budget)], nominal or count(rows), count(rows))

    @classmethod
    def fingerprint(cls, trainer: Trainer, step: int) -> str:
        return trainer.publish(Version("actor", 0, step), cls.transport, "").fingerprint

    # -- updates ------------------------------------------------------------------------------------------------

    def test_an_update_changes_the_published_weights(self, trainer: Trainer) -> None:
        before = self.fingerprint(trainer, 0)
        result = self.step(trainer, 0, make_rows())
        assert result.outcome is UpdateOutcome.APPLIED
        assert result.grad_norm > 0
        assert self.fingerprint(trainer, 1) != before

    def test_the_plan_holds_every_row_once_on_an_instance_not_started(self) -> None:
        lengths = [3, 9, 1, 16, 4, 4, 7]
        trainer = self.make()
        for world_size in (1, 2, 3):
            plan = trainer.plan(lengths, world_size, 16)
            rows = sorted(row for rank in plan.micro_batches for batch in rank for row in batch)
            assert rows == list(range(len(lengths)))
            assert len({len(rank) for rank in plan.micro_batches}) == 1

    @pytest.mark.parametrize("budget", [1, 20])
    def test_the_gradient_does_not_depend_on_micro_batches(
        self, folder: str, first_step: tuple[UpdateResult, str], budget: int
    ) -> None:
        with self.running(folder) as trainer:
            self.assert_near(self.step(trainer, 0, make_rows(), budget=budget), first_step[0])

    def test_chunks_add_up(self, folder: str, first_step: tuple[UpdateResult, str]) -> None:
        rows = make_rows()
        with self.running(folder) as trainer:
            trainer.begin_step(Version("actor", 0, 0))
            parts = [chunk(trainer, rows.take(list(part))) for part in (range(5), range(5, len(rows)))]
            parted = update(trainer, parts, count(rows), count(rows))
        assert parted.grad_norm == pytest.approx(first_step[0].grad_norm, rel=self.tolerance)

    def test_a_late_count_gives_the_same_gradient(self, folder: str, first_step: tuple[UpdateResult, str]) -> None:
        with self.running(folder) as trainer:
            late = self.step(trainer, 0, make_rows(), nominal={**count(make_rows()), "tokens": 1.0})
        self.assert_near(late, first_step[0])

    def assert_near(self, result: UpdateResult, expected: UpdateResult) -> None:
        """Assert that both updates have the same gradient norm and loss, up to `tolerance`."""
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=self.tolerance)
        assert result.metrics["train/loss"] == pytest.approx(expected.metrics["train/loss"], rel=self.tolerance)

    def test_leaving_out_rows_without_gradient_changes_nothing(self, folder: str) -> None:
        rows = make_rows()
        silent = np.repeat(np.arange(len(rows)) % 2, rows.columns["tokens"].lengths).astype(np.float32)
        rows = with_values(rows, "advantages", rows.columns["advantages"].values * silent)
        results = []
        for skips in (True, False):
            with self.running(folder, algorithm=replace(self.algorithm, options={"skips": skips})) as trainer:
                results.append(self.step(trainer, 0, rows))
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=self.tolerance)

    def test_a_step_without_any_gradient_is_applied(self, trainer: Trainer) -> None:
        rows = make_rows()
        result = self.step(trainer, 0, with_values(rows, "advantages", 0 * rows.columns["advantages"].values))
        assert (result.outcome, result.grad_norm) == (UpdateOutcome.APPLIED, 0.0)

    def test_an_aborted_update_leaves_no_trace(self, trainer: Trainer, first_step: tuple[UpdateResult, str]) -> None:
        before = self.fingerprint(trainer, 0)
        trainer.begin_step(Version("actor", 0, 0))
        trainer.begin_update(count(make_rows(1)))
        trainer.accumulate(chunk(trainer, make_rows(1)), True)
        trainer.abort_update()
        assert self.fingerprint(trainer, 0) == before
        assert self.step(trainer, 0, make_rows()).grad_norm == first_step[0].grad_norm

    def test_a_gradient_that_is_not_finite_is_not_applied(self, trainer: Trainer) -> None:
        before, rows = self.fingerprint(trainer, 0), make_rows()
        advantages = rows.columns["advantages"].values.copy()
        advantages[-1] = np.nan
        assert self.step(trainer, 0, with_values(rows, "advantages", advantages)).outcome is UpdateOutcome.NOT_FINITE
        assert self.fingerprint(trainer, 1) == before
        assert self.step(trainer, 1, make_rows(version=1)).outcome is UpdateOutcome.APPLIED

    def test_values_at_masked_positions_never_reach_the_gradient(
        self, trainer: Trainer, first_step: tuple[UpdateResult, str]
    ) -> None:
        rows = make_rows()
        mask, advantages = rows.columns["loss_mask"].values, rows.columns["advantages"].values
        values = np.where(mask == 1, advantages, np.nan).astype(np.float32)
        assert self.step(trainer, 0, with_values(rows, "advantages", values)) == first_step[0]

    # -- lag and versions ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("version", [0, 3])
    def test_a_token_older_than_the_bound_or_from_the_future_is_refused(self, folder: str, version: int) -> None:
        with self.running(folder, max_staleness=1) as trainer:
            for step in range(2):
                self.step(trainer, step, make_rows(version=step))
            with pytest.raises(ValueError, match=f"version {version}"):
                self.step(trainer, 2, make_rows(version=version))

    def test_a_token_within_the_bound_is_trained(self, folder: str) -> None:
        with self.running(folder, max_staleness=1) as trainer:
            self.step(trainer, 0, make_rows())
            assert self.step(trainer, 1, make_rows(version=0)).outcome is UpdateOutcome.APPLIED

    def test_a_step_of_another_version_is_refused(self, trainer: Trainer) -> None:
        with pytest.raises(ValueError, match="version"):
            trainer.begin_step(Version("actor", 0, 3))
        self.step(trainer, 0, make_rows())
        with pytest.raises(ValueError, match="version"):
            trainer.begin_step(Version("actor", 0, 0))

    # -- forward ------------------------------------------------------------------------------------------------

    def test_forward_keeps_the_order_of_the_rows(self, trainer: Trainer) -> None:
        rows = make_rows()
        whole = forward(trainer, rows, 10**6)
        for index in (0, 3, 7):
            alone = forward(trainer, rows.take([index]), 0)
            assert np.allclose(list(whole.rows())[index], alone.values, atol=self.rounding)
        assert np.allclose(forward(trainer, rows, 1).values, whole.values, atol=self.rounding)

    def test_likeliest_tokens_and_given_ones_agree_with_log_probs(self, trainer: Trainer) -> None:
        rows, k = make_rows(), 4
        tokens = rows.columns["tokens"]
        own = Ragged(np.repeat(tokens.values[:, None], k, axis=1).astype(np.int32), tokens.lengths)
        asked = rows.with_columns({"ids": own})
        filled = trainer.forward(chunk(trainer, asked), (f"top_k:{k}", "log_probs_at:ids", "log_probs")).columns
        log_probs, mask = filled["log_probs"].values, rows.columns["loss_mask"].values == 1
        assert np.allclose(filled["log_probs_at:ids"].values, log_probs[:, None], atol=self.rounding)
        best, ids = filled["top_k_log_probs"].values[mask], filled["top_k_ids"].values[mask]
        assert best.shape == ids.shape == (int(mask.sum()), k) and ids.dtype == np.int32
        assert (np.diff(best, axis=1) <= 0).all() and (best[:, 0] >= log_probs[mask] - self.rounding).all()
        assert all(len(set(row)) == k for row in ids.tolist()) and not filled["top_k_ids"].values[~mask].any()
        again = rows.with_columns({"ids": filled["top_k_ids"]})
        found = trainer.forward(chunk(trainer, again), ("log_probs_at:ids",)).columns["log_probs_at:ids"]
        assert np.allclose(found.values, filled["top_k_log_probs"].values, atol=self.rounding)

    def test_no_token_sees_what_follows_it(self, trainer: Trainer) -> None:
        rows = make_rows()
        tokens = rows.columns["tokens"].values.copy()
        ends = np.cumsum(rows.columns["tokens"].lengths) - 1
        tokens[ends] = (tokens[ends] + 1) % VOCAB
        before, after = (forward(trainer, r, 0).values for r in (rows, with_values(rows, "tokens", tokens)))
        same = np.setdiff1d(np.arange(len(tokens)), ends)
        assert np.array_equal(before[same], after[same])
        assert not np.array_equal(before[ends], after[ends])

    # -- weights and checkpoints --------------------------------------------------------------------------------

    def test_continuing_from_a_checkpoint_is_bit_exact(self, folder: str, tmp_path: Path) -> None:
        with self.running(folder) as trainer:
            for step in range(2):
                self.step(trainer, step, make_rows(step, version=step))
            trainer.save(str(tmp_path / "checkpoint"))
            results = [self.step(trainer, step, make_rows(step, version=step)) for step in (2, 3)]
            want = self.fingerprint(trainer, 4)
        with self.running(folder, seed=99) as trainer:
            trainer.load(str(tmp_path / "checkpoint"))
            assert [self.step(trainer, step, make_rows(step, version=step)) for step in (2, 3)] == results
            assert self.fingerprint(trainer, 4) == want

    def test_a_missing_checkpoint_is_refused(self, trainer: Trainer, tmp_path: Path) -> None:
        with pytest.raises(RelaxError, match="nowhere"):
            trainer.load(str(tmp_path / "nowhere"))

    def test_published_weights_equal_exported_weights(self, folder: str, tmp_path: Path) -> None:
        with self.running(folder) as trainer:
            self.step(trainer, 0, make_rows())
            trainer.export(str(tmp_path / "export"))
            published = self.fingerprint(trainer, 1)
        with self.running(str(tmp_path / "export")) as other:
            assert self.fingerprint(other, 0) == published

    def test_payload_and_base_reach_the_transport_with_the_whole_tensors(self, trainer: Trainer) -> None:
        whole = trainer.publish(Version("actor", 0, 0), self.transport, "")
        delta = trainer.publish(Version("actor", 0, 0), self.transport, "", "delta", "actor@0.0")
        assert (whole.payload, whole.base) == ("full", "")
        assert (delta.payload, delta.base) == ("delta", "actor@0.0")
        assert delta.tensors == whole.tensors

    @pytest.mark.parametrize("engines", list(FORMATS))
    def test_weights_go_out_in_the_engines_format(
        self, by_format: dict[str, tuple[UpdateResult, Manifest]], first_step: tuple[UpdateResult, str], engines: str
    ) -> None:
        manifest = by_format[engines][1]
        assert {info.dtype for info in manifest.tensors} == {FORMATS[engines]}
        if engines == self.dtype:
            assert manifest.fingerprint == first_step[1]

    def test_a_step_does_not_depend_on_the_engines_format(
        self, by_format: dict[str, tuple[UpdateResult, Manifest]], first_step: tuple[UpdateResult, str]
    ) -> None:
        assert [result for result, _ in by_format.values()] == [first_step[0]] * len(FORMATS)

    def test_a_model_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(RelaxError, match="nowhere"):
            self.start(self.make(), str(tmp_path / "nowhere"))


class FurtherConfiguration(TrainerSuite):
    """A `TrainerSuite` for a further configuration (options, number format, ranks) of a component tested elsewhere.

    It omits checks that do not depend on the configuration: discovery, the order of versions, names in error texts, and
    equal results in different processes, for which six more processes would be started.
    """

    test_is_of_its_kind: Any = None
    test_no_option_has_the_name_of_a_key_of_the_core: Any = None
    test_discovery_imports_nothing_heavy: Any = None
    test_the_same_input_gives_the_same_result: Any = None
    test_every_process_gives_the_same_result: Any = None
    test_a_token_older_than_the_bound_or_from_the_future_is_refused: Any = None
    test_a_token_within_the_bound_is_trained: Any = None
    test_a_step_of_another_version_is_refused: Any = None
    test_payload_and_base_reach_the_transport_with_the_whole_tensors: Any = None
    test_a_model_folder_that_is_not_there_is_named: Any = None


def started(trainer: Trainer, spec: TrainerSpec) -> Trainer:
    """Start a trainer as its host does; return the trainer that gets all later calls."""
    while isinstance(result := trainer.start(spec), Trainer):
        trainer = result
    return trainer


def update(
    trainer: Trainer, chunks: Sequence[Chunk], nominal: Mapping[str, float], counts: Mapping[str, float]
) -> UpdateResult:
    """Run one update as the actor does; repeat it, at the trainer's lower loss scale, while it overflows."""
    while True:
        trainer.begin_update(nominal)
        for part in chunks:
            trainer.accumulate(part, part is chunks[-1])
        result = trainer.finish_update(counts)
        if result.outcome is not UpdateOutcome.OVERFLOW:
            return result


def chunk(trainer: Trainer, rows: RowBatch, budget: int = 0) -> Chunk:
    """Return rows with the trainer's plan for one rank."""
    return Chunk(rows, trainer.plan([int(length) for length in rows.columns["tokens"].lengths], 1, budget))


def forward(trainer: Trainer, rows: RowBatch, budget: int, columns: Sequence[str] = ("log_probs",)) -> Ragged:
    """Run a forward pass, assert that it returns the same rows in the same order, and return the first column."""
    filled = trainer.forward(chunk(trainer, rows, budget), columns)
    assert filled.ids == rows.ids
    return filled.columns[columns[0]]
