# SPDX-License-Identifier: Apache-2.0
"""Requests to engines: each with the temperature, top-p and top-k of its purpose, evaluation with draws of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_core.api.engine import GenerateRequest
from relax_core.api.events import Logged
from relax_core.sampling.evaluation import SEED_STREAM
from relax_core.sampling.session import sample_seeds
from tests.unit.roles.simulated_run import Asked, SimulatedRun

TRAINED, EVALUATED = (0.7, 0.9, 5), (0.4, 0.9, 5)
HELD, SAMPLES = 4, 2


def _drawn(one: GenerateRequest) -> tuple[float, float, int]:
    return one.temperature, one.top_p, one.top_k


def _run(folder: Path, **evaluation: Any) -> None:
    SimulatedRun(
        folder, steps=4,
        rollout={"groups_per_step": 4, "group_size": 4, "max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
        eval={"every": 2, "size": HELD, "samples": SAMPLES, **evaluation},
    ).run()  # fmt: skip


def test_training_and_evaluation_have_their_own_temperature_and_evaluation_repeats_its_samples(
    tmp_path: Path, asked: Asked
) -> None:
    _run(tmp_path, temperature=0.4)
    assert {_drawn(one) for one in asked.requests} == {TRAINED, EVALUATED}
    evaluations: dict[int, set[tuple[tuple[int, ...], int]]] = {}
    for one in asked.requests:
        if _drawn(one) == EVALUATED:
            evaluations.setdefault(one.floor, set()).add((one.tokens, one.seed))
    assert sorted(evaluations) == [0, 2, 4], "only an engine with the version evaluated may answer"
    first, *later = evaluations.values()
    assert len({tokens for tokens, _ in first}) == HELD and len(first) == HELD * SAMPLES
    assert all(one == first for one in later), "two evaluations differ by the weights alone"
    trained = {one.seed for one in asked.requests if _drawn(one) == TRAINED}
    assert not trained & {seed for _, seed in first}


def test_no_row_that_equals_a_held_out_task_is_trained(tmp_path: Path, asked: Asked) -> None:
    """Eight prompts stand twice in the file, each in two spellings: the hold-out keeps both from training."""
    tasks = tmp_path / "repeated.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": text}) + "\n" for at in range(8) for text in (f"p{at}", f" P{at}.")))
    outcome = SimulatedRun(
        tmp_path, steps=4, data={"train": str(tasks)}, eval={"every": 4, "size": HELD, "temperature": 0.4}
    ).run()
    prompts: dict[bool, set[str]] = {True: set(), False: set()}
    for one in asked.requests:
        prompts[one.temperature == 0.4].add("".join(map(chr, one.tokens)).strip(" .").lower())
    assert prompts[True] and prompts[False] and not prompts[True] & prompts[False]
    said = [event.message for event in outcome.told(Logged)]
    assert any("rows equal a held-out row and are not trained on" in text for text in said)


def test_evaluation_samples_with_the_training_settings_by_default(tmp_path: Path, asked: Asked) -> None:
    _run(tmp_path)
    assert {_drawn(one) for one in asked.requests} == {TRAINED}


def test_a_greedy_evaluation_truncates_nothing(tmp_path: Path, asked: Asked) -> None:
    _run(tmp_path, temperature=0, samples=1)
    assert {_drawn(one) for one in asked.requests} == {TRAINED, (0.0, 1.0, 0)}


def test_the_seeds_of_evaluation_are_not_those_of_training_for_equal_numbers() -> None:
    """A held-out task may have the number of a training group: the stream keeps their seeds apart."""
    trained, evaluated = ({seed for group in range(64) for seed in sample_seeds(run, group, range(8))}
                          for run in (5, 5 ^ SEED_STREAM))  # fmt: skip
    assert not trained & evaluated
