# SPDX-License-Identifier: Apache-2.0
"""What engines are asked: each with the temperature and top-p of its purpose, evaluation with draws of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.engine import GenerateRequest
from tests.unit.roles import simulated_run
from tests.unit.roles.simulated_run import SimulatedRun, SimulatedWorker

TRAINED, EVALUATED = (0.7, 0.9), (0.4, 0.9)
HELD, SAMPLES, STEPS = 4, 2, 4


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """Everything that engines were asked to continue."""
    asked = list[GenerateRequest]()
    stream = SimulatedWorker.stream

    def listening(self: SimulatedWorker, method: str, *args: Any, timeout_s: float) -> AsyncIterator[Any]:
        if method == "generate":
            asked.extend(args[0])
        return stream(self, method, *args, timeout_s=timeout_s)

    monkeypatch.setattr(simulated_run.SimulatedWorker, "stream", listening)
    return asked


def _run(folder: Path, **evaluation: Any) -> None:
    SimulatedRun(
        folder,
        steps=STEPS,
        rollout={"groups_per_step": 4, "group_size": 4, "max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9},
        eval={"every": 2, "size": HELD, "samples": SAMPLES, **evaluation},
    ).run()


def test_training_and_evaluation_ask_with_their_own_temperature_and_evaluation_draws_the_same_each_time(
    tmp_path: Path, asked: list[GenerateRequest]
) -> None:
    _run(tmp_path, temperature=0.4)
    assert {(one.temperature, one.top_p) for one in asked} == {TRAINED, EVALUATED}
    evaluations: dict[int, set[tuple[tuple[int, ...], int]]] = {}
    for one in asked:
        if (one.temperature, one.top_p) == EVALUATED:
            evaluations.setdefault(one.floor, set()).add((one.tokens, one.seed))
    assert sorted(evaluations) == [0, 2, 4], "only an engine with the version evaluated may answer"
    first, *later = evaluations.values()
    assert len({tokens for tokens, _ in first}) == HELD and len(first) == HELD * SAMPLES
    assert all(one == first for one in later), "two evaluations differ by the weights alone"
    trained = {one.seed for one in asked if (one.temperature, one.top_p) == TRAINED}
    assert not trained & {seed for _, seed in first}


def test_evaluation_samples_as_training_does_unless_it_is_told_otherwise(
    tmp_path: Path, asked: list[GenerateRequest]
) -> None:
    _run(tmp_path)
    assert {(one.temperature, one.top_p) for one in asked} == {TRAINED}


def test_a_greedy_evaluation_has_no_nucleus(tmp_path: Path, asked: list[GenerateRequest]) -> None:
    _run(tmp_path, temperature=0, samples=1)
    assert {(one.temperature, one.top_p) for one in asked} == {TRAINED, (0.0, 1.0)}


def test_the_seeds_of_evaluation_are_not_those_of_training_for_equal_numbers() -> None:
    """A held-out task has the number that a training group may have: what keeps them apart is the stream."""
    from relax_core.sampling.evaluation import SEED_STREAM
    from relax_core.sampling.session import sample_seed

    places = [(group, sample) for group in range(64) for sample in range(8)]
    assert not {sample_seed(5, *at) for at in places} & {sample_seed(5 ^ SEED_STREAM, *at) for at in places}
