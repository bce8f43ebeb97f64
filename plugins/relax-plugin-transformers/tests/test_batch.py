# SPDX-License-Identifier: Apache-2.0
"""Rows may join, leave, lose their cache and be flushed at any moment: each decodes as if it were alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings, strategies as st
from relax_plugin_transformers.batch import Batch
from relax_plugin_transformers.model import CausalModel

from relax_core.api.engine import Delta, GenerateRequest
from relax_core.engine_kit.engine_thread import OpenRequest
from relax_core.testing.engine_fixture import joined, tiny_qwen3

WINDOW = 3
NOBODY = SimpleNamespace(post=lambda item: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = tiny_qwen3(str(tmp_path_factory.mktemp("model")), 1)
    return CausalModel(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), max_prefill_tokens=64)


def member(number: int, length: int, new: int) -> OpenRequest:
    tokens = tuple((7 * number + 3 * at) % 60 + 2 for at in range(length))
    return OpenRequest(GenerateRequest(f"r{number}", tokens, new, seed=number, stop_tokens=(50 + number % 14,)), NOBODY)


def alone(model: CausalModel, of: OpenRequest) -> Delta:
    batch, parts = Batch.prefill([of], model, 100), []
    while len(batch):
        parts += batch.take_finished(0)
        if len(batch):
            batch.step(model)
    return joined([delta for _, delta in parts])


JOIN = st.tuples(st.just("join"), st.integers(1, 3), st.integers(1, 40), st.integers(1, 25))
EVENTS = st.lists(
    st.one_of(
        JOIN,
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("forget")),
        st.tuples(st.just("flush")),
    ),
    max_size=14,
)


class Script:
    """A batch under a list of events."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.batch: Batch | None = None
        self.members: list[OpenRequest] = []
        self.parts: dict[str, list[Delta]] = {}

    def hold(self, finished: list) -> None:
        for of, delta in finished:
            self.parts.setdefault(of.request.id, []).append(delta)

    def join(self, count: int, length: int, new: int) -> None:
        joining = [member(len(self.members) + i, length + i, new) for i in range(count)]
        self.members += joining
        batch = Batch.prefill(list(joining), self.model, WINDOW)
        self.hold(batch.take_finished(0))
        if not len(batch):
            return
        if self.batch is None or not len(self.batch):
            self.batch = batch
            return
        if not self.batch.has_cache:
            self.step(1)
        self.batch.merge(batch)

    def step(self, count: int) -> None:
        for _ in range(count):
            if self.batch is not None and len(self.batch):
                if self.batch.full:
                    self.hold(self.batch.flush(0))
                self.batch.step(self.model)
                self.hold(self.batch.take_finished(0))

    def abort(self, row: int) -> None:
        if self.batch is not None and row < len(self.batch):
            self.hold(self.batch.take([row], "abort", 0))

    def forget(self) -> None:
        if self.batch is not None:
            self.batch.drop_cache()

    def flush(self) -> None:
        if self.batch is not None:
            self.hold(self.batch.flush(0))


@pytest.fixture(scope="module")
def singles() -> dict[tuple, Delta]:
    """What each request gets when it is decoded alone, by its tokens, their number and its seed."""
    return {}


@settings(max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(JOIN, EVENTS, JOIN).map(lambda parts: [parts[0], *parts[1], parts[2]]))
def test_every_row_decodes_as_if_it_were_alone(
    model: CausalModel, singles: dict[tuple, Delta], events: list[tuple]
) -> None:
    with torch.inference_mode():
        script = Script(model)
        for name, *arguments in events:
            getattr(script, name)(*arguments)
        script.step(200)
        for of in script.members:
            key = (of.request.tokens, of.request.max_new_tokens, of.request.seed)
            if key not in singles:
                singles[key] = alone(model, of)
            got, want = joined(script.parts[of.request.id]), singles[key]
            assert got.finish in (want.finish, "abort")
            assert got.tokens == want.tokens[: len(got.tokens)]
            assert got.finish == "abort" or len(got.tokens) == len(want.tokens)
            np.testing.assert_allclose(got.log_probs, want.log_probs[: len(got.tokens)], atol=1e-4)


def test_samples_of_one_prompt_run_it_once(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda tokens, *rest, **kw: seen.append(tokens.shape) or forward(tokens, *rest, **kw)
    )
    members = [OpenRequest(GenerateRequest(f"s{seed}", (5, 6, 7), 4, seed=seed), NOBODY) for seed in range(8)]
    with torch.inference_mode():
        Batch.prefill(members, model, WINDOW)
    assert seen == [(1, 3)]


@torch.inference_mode()
def test_the_next_sampled_token_depends_only_on_seed_and_position(model: CausalModel) -> None:
    """So a request that goes on elsewhere behind the tokens that it has draws what it would have drawn."""
    request = GenerateRequest("whole", (5, 6, 7), 12, seed=3)
    tokens = tuple(alone(model, OpenRequest(request, NOBODY)).tokens)
    assert len(tokens) == 12
    for had in (1, 4, 11):
        rest = GenerateRequest("rest", request.tokens + tokens[:had], 12 - had, seed=3)
        assert tuple(alone(model, OpenRequest(rest, NOBODY)).tokens) == tokens[had:]
