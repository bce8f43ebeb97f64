# SPDX-License-Identifier: Apache-2.0
"""Teachers in whole runs in virtual time: every row is scored by its own, in every placement, with the policy's own ids."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax_core.api import Ragged, RowBatch, RowId, WorkerDied
from relax_core.roles.teacher import PoolTeacher
from tests.unit.roles.simulated_run import Asked, SimulatedRun

TRAINER = '''
"""A trainer whose forward says who it is, and an actor that checks what it is given."""
import numpy as np
from relax_core.api import Ragged
from relax_core.api.algorithm import Output
from tests.unit.roles.scripted_components import ScriptedTrainer, TrainerOptions

class TeachingOptions(TrainerOptions):
    pass

class TeachingTrainer(ScriptedTrainer):
    def start(self, spec):
        if spec.role == "teacher":
            assert set(spec.model) == {"path", "dtype", "head_dtype"}, spec.model
            self._spec, self._step, self._number = spec, 0, int(spec.model["path"][-1])
            return {}
        self._number = -1
        return super().start(spec)

    def forward(self, chunk, columns):
        """Log-probs are the teacher's number; likeliest ids are the row's group, which a teacher must see again."""
        tokens = chunk.rows.columns["tokens"]
        group = np.repeat([row.group for row in chunk.rows.ids], tokens.lengths).astype(np.int32)
        made = {}
        for output in map(Output.parse, columns):
            if output.name == "top_k":
                made["top_k_ids"] = np.repeat(group[:, None], output.k, 1)
                made["top_k_log_probs"] = np.full((len(group), output.k), float(self._number), np.float32)
            elif output.name == "log_probs_at":
                ids = chunk.rows.columns[output.ids].values
                assert (ids == group[:, None]).all(), "ids of other rows"
                made[output.key] = np.full(ids.shape, float(self._number), np.float32)
            else:
                made[output.key] = np.full(len(group), float(self._number), np.float32)
        return chunk.rows.with_columns({name: Ragged(values, tokens.lengths) for name, values in made.items()})

    async def accumulate(self, chunk, last):
        columns = chunk.rows.columns
        if self._number < 0:
            for name in ("teacher_log_probs", "teacher_top_k_log_probs", "teacher_log_probs_at"):
                if name in columns:
                    self.check(chunk.rows, columns[name].values)
        await super().accumulate(chunk, last)

    def check(self, rows, values):
        """By the first token of a prompt: p0 to p7 belong to teacher 1, the others to teacher 2."""
        starts = rows.columns["tokens"].offsets()[:-1]
        told = values[starts] if values.ndim == 1 else values[starts, 0]
        number = rows.columns["tokens"].values[starts + 1]
        want = np.where(number < WHERE, 1.0, 2.0)
        assert (told == want).all(), (told, want, number)
'''
STEPS = 3
BY_DOMAIN = [{"path": "/teachers/1", "only": "domain=low"}, {"path": "/teachers/2", "only": "domain=high"}]


def simulation(folder: Path, algorithm: dict[str, Any], teachers: Any, tasks: int = 10, **more: Any) -> SimulatedRun:
    """Tasks p0 to p9, in two domains."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"p{number}", "domain": "low" if number < 5 else "high"} for number in range(tasks)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "teaching.py").write_text(TRAINER.replace("WHERE", str(ord("5"))))
    return SimulatedRun(
        folder, [str(folder / "teaching.py")], data={"train": str(folder / "own.jsonl")}, trainer="teaching",
        algorithm={"name": "distillation", **algorithm}, teachers=teachers, steps=STEPS, **more,
    )  # fmt: skip


SAMPLED: dict[str, Any] = {}
STUDENT = {"mode": "loss", "tokens": "student-top-k", "k": 3}
TEACHER = {"mode": "loss", "tokens": "teacher-top-k", "k": 3}


@pytest.mark.parametrize(
    ("algorithm", "placement"),
    [(SAMPLED, "colocate"), (STUDENT, "colocate"), (TEACHER, "hybrid"), (STUDENT, "async")],
    ids=["sampled-colocate", "student-colocate", "teacher-hybrid", "student-async"],
)
def test_every_row_has_the_columns_of_its_own_teacher(
    tmp_path: Path, algorithm: dict[str, Any], placement: str
) -> None:
    outcome = simulation(tmp_path, algorithm, BY_DOMAIN, placement=placement).run()
    outcome.assert_whole(STEPS, 1)
    assert outcome.of("teacher-0-rank-0", "forward") and outcome.of("teacher-1-rank-0", "forward")
    assert bool(outcome.of("actor-fwd", "forward")) == (algorithm is STUDENT)


def test_one_teacher_scores_all_rows_without_rewards(tmp_path: Path, asked: Asked) -> None:
    teachers = [{"path": "/teachers/1", "dtype": "bfloat16"}]
    outcome = simulation(tmp_path, STUDENT, teachers, tasks=5, rewards=[], placement="async").run()
    assert {role: spec.model["dtype"] for role, spec in asked.trainers.items()} == {
        "actor": "float32", "actor_fwd": "float32", "teacher": "bfloat16",
    }  # fmt: skip
    outcome.assert_whole(STEPS, 1)
    assert {span.worker for span in outcome.of("teacher", "forward")} == {"teacher-rank-0"}
    assert set(outcome.metric("reward/mean")) == {0.0}


def test_ranks_of_a_teacher_share_the_rows(tmp_path: Path) -> None:
    placement = {"mode": "async", "teacher": {"ranks": 2}}
    outcome = simulation(tmp_path, TEACHER, "/teachers/1", tasks=5, placement=placement).run()
    outcome.assert_whole(STEPS, 1)
    assert {span.worker for span in outcome.of("teacher", "forward")} == {"teacher-rank-0", "teacher-rank-1"}


class Pool:
    """The client of a pool that takes turns, and breaks off while it scores."""

    paused = True

    async def resume(self) -> None:
        self.paused = False

    async def pause(self) -> None:
        self.paused = True

    async def score_rows(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        assert not self.paused
        raise WorkerDied("its engine is gone")


async def test_a_pool_that_breaks_off_while_it_scores_gives_its_devices_back() -> None:
    teacher = PoolTeacher(
        SimpleNamespace(config=SimpleNamespace(rollout=SimpleNamespace(temperature=1.0))), pool := Pool()
    )
    rows = RowBatch((RowId(0, 0, 0, 0),), {"tokens": Ragged(np.array([1, 2], np.int32), np.array([2]))})
    with pytest.raises(WorkerDied):
        await teacher.forward(rows, ["log_probs"])
    assert pool.paused
