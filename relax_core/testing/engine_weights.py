# SPDX-License-Identifier: Apache-2.0
"""The part of `EngineSuite` that checks weight updates: full versions, deltas, adapters and number formats.

Updates come between requests and during a request. An engine must load a version exactly as published or refuse the
whole version. For each token, the engine must report the version that sampled the token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_core.api.component import Chosen
from relax_core.api.engine import Engine
from relax_core.api.errors import RelaxError
from relax_core.api.weights import Manifest, TensorInfo, Version, combined_fingerprint, tensor_fingerprint
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import (
    PROMPT,
    PROMPTS,
    VOCABULARY,
    EngineFixture,
    Tensors,
    adapter,
    agrees,
    damaged,
    folder_with,
    joined,
    merged,
    moved,
    plain_log_probs,
    rounded,
    tensors_of,
    tiny_qwen3,
)
from relax_core.testing.suite import Suite

REFUSED = (ValueError, RelaxError)
APART = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15}
"""Largest difference of a log-prob from that of a float32 forward with the same rounded weights, by number format."""
NORMAL = 1e-5
"""Largest difference of a sum of probabilities from 1; a softmax in bfloat16 is off by a hundred times as much."""

LARGEST = 8
"""Number of the likeliest tokens of the test model whose logits are 1 or more."""
STEP = 2.0**-7
"""Distance of bfloat16 numbers from 1 to 2, of which larger numbers are multiples."""


def on_a_grid(ranked: Sequence[tuple[int, float]]) -> bool:
    """Return True if all differences of these log-probs, which are those of the logits, are multiples of `STEP`."""
    steps = (ranked[0][1] - np.array([log_prob for _, log_prob in ranked])) / STEP
    return bool((np.abs(steps - steps.round()) < 0.01).all())


class WeightChecks(Suite):
    """The weight tests of `EngineSuite`; a test that changes the engine's weights restores them."""

    kind: ClassVar[str] = "engine"
    # Only a started engine computes anything, so a process apart would only import the engine.
    test_the_same_input_gives_the_same_result: Any = None
    test_every_process_gives_the_same_result: Any = None

    @pytest.fixture(scope="class")
    def lab(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFixture]:
        if request.cls.generic:
            pytest.importorskip("transformers", reason="the reference forward needs transformers")
        first, second = (tiny_qwen3(str(tmp_path_factory.mktemp("model")), seed) for seed in (1, 2))
        lab = EngineFixture(request.cls.make_engine(), first, second).start(version=Version("actor", 0, 0))
        yield lab
        lab.stop()

    @classmethod
    def make_engine(cls) -> Engine:
        """Make an engine. Its `build`, which a host would set, returns the suite's weight transport."""
        engine = cls.make()
        assert isinstance(engine, Engine)
        engine.build = lambda chosen: Disk()  # type: ignore[attr-defined]
        return engine

    def needs(self, claimed: object, what: str) -> None:
        if not claimed:
            pytest.skip(f"the engine does not declare {what}")

    def still_serves(self, lab: EngineFixture) -> None:
        (got,) = lab.generate(lab.request(PROMPT, 2))
        assert len(got.tokens) == 2
        health = lab.run(lab.engine.health())
        assert (health.ok, health.running, health.waiting) == (True, 0, 0)

    def refused(self, lab: EngineFixture, manifest: Manifest) -> None:
        before = lab.version
        with pytest.raises(REFUSED):
            lab.update(manifest)
        assert lab.version == before
        (got,) = lab.generate(lab.request(PROMPT, 5, seed=1))
        agrees(lab.model, PROMPT, got)

    # -- whole versions -----------------------------------------------------------------------------------------

    @pytest.fixture
    def renewed(self, lab: EngineFixture) -> Iterator[Callable[[], str]]:
        """Return a function that loads the fixture's second model; restore the first model afterwards."""

        def renew() -> str:
            manifest = lab.publish()
            assert lab.update(manifest).fingerprint == manifest.fingerprint
            return lab.other

        yield renew
        lab.update(lab.publish(source=lab.model))

    def test_new_weights_are_in_the_next_token(self, lab: EngineFixture, renewed: Callable[[], str]) -> None:
        other = renewed()
        (got,) = lab.generate(lab.request(PROMPT, 9, seed=1))
        agrees(other, PROMPT, got)
        assert got.version == got.oldest_cache == lab.version.step

    def test_receipt_proves_what_the_manifest_says(self, lab: EngineFixture, renewed: Callable[[], str]) -> None:
        renewed()
        manifest = lab.publish()
        receipt = lab.update(manifest)
        assert (receipt.version, receipt.fingerprint) == (manifest.version, manifest.fingerprint)
        assert receipt.level == lab.engine.capabilities.receipts

    @pytest.mark.parametrize("fault", ["missing", "extra", "shape", "dtype", "renamed"])
    def test_a_version_that_is_not_this_model_is_refused_whole(self, lab: EngineFixture, fault: str) -> None:
        self.refused(lab, lab.publish(damaged(tensors_of(lab.other), fault)))

    def test_stale_bytes_are_refused_whole(self, lab: EngineFixture) -> None:
        stale, fresh = lab.publish(source=lab.model), lab.publish(source=lab.other)
        self.refused(lab, replace(fresh, location=stale.location))

    def test_abandoned_incarnation_older_step_and_other_model_are_refused(self, lab: EngineFixture) -> None:
        lab.update(lab.publish(source=lab.model, version=Version("actor", lab.version.incarnation + 1, 50)))
        have = lab.version
        for old in (have._replace(incarnation=have.incarnation - 1, step=99), have._replace(step=49)):
            self.refused(lab, lab.publish(version=old))
        self.refused(lab, lab.publish(version=Version("critic", have.incarnation, 200)))

    def test_unknown_transport_is_refused(self, lab: EngineFixture) -> None:
        with pytest.raises(REFUSED):
            lab.run(lab.engine.update_weights(lab.publish(), Chosen("weight-transport", "carrier-pigeon")))
        self.still_serves(lab)

    # -- updates during a request ---------------------------------------------------------------------------------

    def test_weights_may_land_in_the_middle_of_a_request(self, lab: EngineFixture, renewed: Callable[[], str]) -> None:
        self.needs(lab.engine.capabilities.in_flight_updates, "in-flight updates")
        before, requests = lab.version.step, [lab.endless(prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
        parts = lab.updated_amid(requests, renewed)
        folders = {before: lab.model, lab.version.step: lab.other}
        assert {part.version for part in parts if part.tokens} == set(folders)
        for request in requests:
            own, so_far = [part for part in parts if part.id == request.id], request.tokens
            assert joined(own).finish == "abort"
            for part in own:
                assert part.oldest_cache == part.version
                agrees(folders[part.version], so_far, part)
                so_far += part.tokens

    def test_caches_kept_over_an_update_are_reported_and_never_shared(self, lab: EngineFixture) -> None:
        self.needs(lab.engine.capabilities.keeps_kv_across_versions, "caches that outlive an update")
        other = EngineFixture(self.make_engine(), lab.model, lab.other)
        other.start(version=Version("actor", 0, 0), kv_across_versions=True)
        try:
            self._keeps_its_cache(other)
        finally:
            other.stop()

    def _keeps_its_cache(self, lab: EngineFixture) -> None:
        found = lab.updated_amid(
            [lab.endless(PROMPT, seed=1)], lambda: lab.update(lab.publish(version=Version("actor", 0, 1)))
        )
        parts = [part for part in found if part.tokens]
        assert {part.version for part in parts} == {0, 1}
        assert {part.oldest_cache for part in parts} == {0}, (
            "oldest_cache must be the version under which the cache began"
        )
        so_far: tuple[int, ...] = PROMPT
        for part in parts:
            if part.version == 0:
                agrees(lab.model, so_far, part)
            so_far += part.tokens
        (again,) = lab.generate(lab.request(so_far, 9, seed=1))
        assert (again.version, again.oldest_cache) == (1, 1)
        agrees(lab.other, so_far, again)

    # -- adapters -----------------------------------------------------------------------------------------------

    def test_each_adapter_is_applied_to_the_folders_weights(self, lab: EngineFixture, tmp_path: Path) -> None:
        self.needs(lab.engine.capabilities.lora, "adapters")
        try:
            for seed in (1, 2):
                tensors = adapter(lab.model, seed)
                manifest = lab.publish_adapter(tensors)
                receipt = lab.update(manifest)
                assert (receipt.version, receipt.fingerprint) == (manifest.version, manifest.wire_fingerprint)
                (got,) = lab.generate(lab.request(PROMPT, 9, seed=seed))
                agrees(merged(lab.model, tensors, tmp_path / str(seed)), PROMPT, got)
                assert got.version == manifest.version.step
        finally:
            lab.update(lab.publish(source=lab.model))

    @pytest.mark.parametrize("fault", ["base", "unknown module", "half", "missing module", "rank"])
    def test_a_wrong_adapter_is_refused_whole(self, lab: EngineFixture, fault: str) -> None:
        self.needs(lab.engine.capabilities.lora, "adapters")
        good = adapter(lab.model, 1)
        wrong: dict[str, Tensors] = {
            "base": good,
            "unknown module": [*good, ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", *good[0][1:])],
            "half": good[1:],
            "missing module": good[2:],
            "rank": [(name, array[:1] if "lora_A" in name else array[:, :1], dtype) for name, array, dtype in good],
        }
        self.refused(lab, lab.publish_adapter(wrong[fault], "elsewhere" if fault == "base" else ""))

    # -- deltas -------------------------------------------------------------------------------------------------

    @pytest.fixture
    def based(self, lab: EngineFixture) -> Iterator[EngineFixture]:
        """Publish the first weights as the base of a delta; restore them afterwards.

        If an option of the engine enables deltas, its suite sets the option in `options`.
        """
        self.needs(lab.engine.capabilities.delta, "deltas")
        lab.update(lab.publish(source=lab.model))
        yield lab
        lab.update(lab.publish(source=lab.model))

    def test_deltas_give_what_the_whole_version_would(self, based: EngineFixture, tmp_path: Path) -> None:
        tensors = tensors_of(based.model)
        for seed in (1, 2):
            tensors = moved(tensors, seed)
            manifest = based.publish_delta(tensors)
            assert manifest.wire_bytes < manifest.size_bytes / 2
            receipt = based.update(manifest)
            assert (receipt.version, receipt.fingerprint) == (manifest.version, manifest.wire_fingerprint)
            assert receipt.level == based.engine.capabilities.receipts
            (got,) = based.generate(based.request(PROMPT, 9, seed=seed))
            arrays = {name: array for name, array, _ in tensors}
            agrees(folder_with(based.model, arrays, tmp_path / str(seed)), PROMPT, got)
            assert got.version == manifest.version.step
        whole = based.update(based.publish(tensors))
        assert (whole.resident, whole.layout) == (receipt.resident, receipt.layout), (
            "a delta gives different weights than the full version"
        )

    @pytest.mark.parametrize("fault", ["base", "damaged", "other model"])
    def test_a_wrong_delta_is_refused_whole(self, based: EngineFixture, fault: str) -> None:
        first = moved(tensors_of(based.model), 1)
        have = based.version
        based.publish_delta(first)  # never loaded by the engine
        manifest = based.publish_delta(moved(first, 2))
        if fault == "damaged":  # claims the right base, but its bytes belong to another base
            manifest = replace(manifest, base=str(have))
        if fault == "other model":
            manifest = replace(manifest, tensors=manifest.tensors[1:])
        self.refused(based, manifest)

    def test_a_delta_over_an_adapter_is_refused(self, based: EngineFixture) -> None:
        self.needs(based.engine.capabilities.lora, "adapters")
        base = based.publish_adapter(adapter(based.model, 1), based.publish(source=based.model).fingerprint)
        based.update(base)
        adapted = based.version
        based.transport.send(adapted, "full", "", tensors_of(based.model), based.location)
        with pytest.raises(ValueError, match="its base contains an adapter"):
            based.update(based.publish_delta(moved(tensors_of(based.model), 1)))
        assert based.version == adapted

    # -- number formats: weights are stored in the declared format, log-probs are computed in float32 -----------------

    @pytest.fixture(scope="class", params=tuple(APART))
    def formatted(self, request: pytest.FixtureRequest) -> Iterator[tuple[str, EngineFixture]]:
        """Return the engine of the other tests, and start a new engine for each further number format.

        All engines start from a folder with float32 weights.
        """
        lab, dtype = request.getfixturevalue("lab"), request.param
        if dtype not in lab.engine.capabilities.dtypes:
            pytest.skip(f"the engine does not declare the format {dtype}")
        if dtype == lab.facts["dtype"]:
            yield dtype, lab
            lab.update(lab.publish(source=lab.model))
            return
        other = EngineFixture(request.cls.make_engine(), lab.model, lab.other)
        yield dtype, other.start(dtype, version=Version("actor", 0, 0))
        other.stop()

    def test_every_format_is_published_and_scored_in_float32(
        self, formatted: tuple[str, EngineFixture], tmp_path: Path
    ) -> None:
        import torch

        dtype, lab = formatted
        assert lab.facts["dtype"] == dtype
        manifest = lab.publish(rounded(tensors_of(lab.other), dtype))
        assert lab.update(manifest).fingerprint == manifest.fingerprint
        (got,) = lab.generate(lab.request(PROMPT, 9, seed=1, num_top=VOCABULARY))
        for ranked in got.top:
            assert abs(np.exp([value for _, value in ranked], dtype=np.float64).sum() - 1) < NORMAL
        kind = getattr(torch, dtype)
        values = {n: torch.from_numpy(np.array(a)).to(kind).float().numpy() for n, a, _ in tensors_of(lab.other)}
        folder = folder_with(lab.other, values, tmp_path / "rounded")
        rows = plain_log_probs(folder, (*PROMPT, *got.tokens))[len(PROMPT) - 1 : -1]
        want = rows[np.arange(len(got.tokens)), list(got.tokens)]
        np.testing.assert_allclose(got.log_probs, want, atol=APART[dtype], rtol=0)

    @pytest.fixture(scope="class")
    def second(self, request: pytest.FixtureRequest, lab: EngineFixture) -> Iterator[EngineFixture]:
        """Return another engine, with logits in float32 of bfloat16 weights if the engine has them; a later test stops it."""
        other = EngineFixture(request.cls.make_engine(), lab.model, lab.other)
        formats = ("bfloat16", "float32") if lab.engine.capabilities.float32_head else ()
        yield other.start(*formats, version=Version("actor", 0, 0))
        other.stop()

    def test_a_float32_head_does_not_round_logits(self, second: EngineFixture) -> None:
        self.needs(second.engine.capabilities.float32_head, "logits in float32 of bfloat16 weights")
        manifest = second.publish(rounded(tensors_of(second.other), "bfloat16"))
        assert second.update(manifest).fingerprint == manifest.fingerprint, "the weights are those without this key"
        (got,) = second.generate(second.request(PROMPT, 9, seed=1, num_top=LARGEST))
        assert got.top
        assert not all(map(on_a_grid, got.top)), "the logits are multiples of the steps of bfloat16"

    def test_an_adapter_is_applied_to_the_folders_weights_in_every_format(
        self, formatted: tuple[str, EngineFixture]
    ) -> None:
        dtype, lab = formatted
        self.needs(lab.engine.capabilities.lora, "adapters")
        tensors = rounded(tensors_of(lab.model), dtype)
        lab.update(lab.publish(tensors))
        base = combined_fingerprint(
            TensorInfo(name, array.shape, own, tensor_fingerprint(array), array.nbytes) for name, array, own in tensors
        )
        manifest = lab.publish_adapter(adapter(lab.model, 1), base)
        assert lab.update(manifest).fingerprint == manifest.wire_fingerprint
