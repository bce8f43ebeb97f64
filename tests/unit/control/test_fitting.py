# SPDX-License-Identifier: Apache-2.0
"""A run that can't fit is refused as its plan is, and memory that is free is what a container leaves."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from relax_core.api.engine import EngineSpec
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Estimate, Workload
from relax_core.control import memory_check
from relax_core.control.memory_check import free_memory
from relax_core.control.planner import plan
from relax_core.registry.catalogue import Catalogue
from relax_core.testing.trainer import tiny_model
from tests.unit.control.conftest import configured


def checked(folder: str, *overrides: str) -> None:
    catalogue = Catalogue.load()
    config = configured(catalogue, *overrides, model={"path": folder}, rollout={"max_new_tokens": 8})
    memory_check.check_fits(config, catalogue, plan(config, catalogue, on_gpus=False))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(memory_check, "longest_prompt", lambda *_: 8)  # its tasks want a tokenizer
    return tiny_model(tmp_path)


def test_a_plan_that_cannot_fit_is_refused_unless_forced(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_memory", lambda: 1 << 29)
    with pytest.raises(
        ConfigError, match=r"host memory, which has 512 MiB|0.5 GiB available.*placement.check_memory=false"
    ):
        checked(folder)
    checked(folder, "placement.check_memory=false")


def test_a_model_much_smaller_than_free_memory_is_not_checked(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_memory", lambda: 1 << 40)
    monkeypatch.setattr(memory_check, "process_needs", None)
    checked(folder)


def test_the_folder_of_an_unused_teacher_need_not_exist(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "process_needs", None)
    checked(folder, "teachers=[{path='not-made'}]")


def limited(folder: Path, limit: str, used: int = 0, cached: int = 0) -> Path:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file 10\n")
    return folder


def test_a_container_gives_what_is_left_below_its_limit_and_what_only_caches_files(tmp_path: Path) -> None:
    assert free_memory(limited(tmp_path, "1000", used=700, cached=40)) == 1000 - 700 + 50


def test_without_a_limit_the_machine_gives_what_is_available(tmp_path: Path) -> None:
    there = psutil.virtual_memory().total
    assert 0 < free_memory(limited(tmp_path, "max")) <= there
    assert 0 < free_memory(tmp_path / "no-container") <= there


@pytest.mark.parametrize(("ranks", "estimated"), [(1, [0]), (3, [0, 2])])
def test_equal_ranks_are_estimated_once(
    ranks: int, estimated: list[int], catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def estimate(trainer: object, context: object, group: object, rank: int, step: object) -> Estimate:
        seen.append(rank)
        return Estimate({"train": {"parameters": rank + 1}})

    monkeypatch.setattr(memory_check, "_rank_estimate", estimate)
    config = configured(catalogue, f"placement.actor.ranks={ranks}")
    placed = plan(config, catalogue, on_gpus=False)
    (need,) = memory_check.process_needs(config, catalogue, placed, 8, [placed.groups["actor"]])
    assert seen == estimated
    assert [one.phases["train"]["parameters"] for one in need.processes] == [1, *[ranks] * (ranks - 1)]


class SizedEngine:
    """An engine whose estimate is the number of tokens of all rows."""

    kind = "engine"

    def estimate(self, spec: EngineSpec, work: Workload) -> Estimate:
        return Estimate({"generate": {"kv cache": work.rows * work.row_tokens}}, {"generate": work.rows})


@pytest.mark.parametrize(
    ("evaluation", "tokens"),
    [
        ({"every": 0}, 2 * 32 * (8 + 4)),
        ({"size": 100}, 100 * (8 + 4)),
        ({"size": 100, "samples": 3}, 300 * (8 + 4)),
        ({"sets": [{"name": "long", "path": "few.jsonl", "max_new_tokens": 900}]}, 3 * (8 + 900)),
        ({"sets": [{"name": "long", "path": "few.jsonl", "max_new_tokens": 900, "size": 2}]}, 2 * (8 + 900)),
        ({"sets": [{"name": "some", "path": "few.jsonl"}, {"name": "many", "path": "few.jsonl", "samples": 200}]}, 600 * 12),
    ],
)  # fmt: skip
def test_engines_are_estimated_for_the_largest_evaluation_set_too(
    evaluation: dict[str, object], tokens: int, catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": "x"}) + "\n" for text in "abc"))
    rollout = {"groups_per_step": 8, "group_size": 4, "max_new_tokens": 4}
    config = configured(catalogue, "max_staleness=1", "placement.rollout.engines=1", rollout=rollout, eval=evaluation)
    placed = plan(config, catalogue, on_gpus=False)
    made = memory_check.PlanContext(config, placed, catalogue.build)
    step = memory_check.largest_step(config, placed, 8)
    found = memory_check._engine_estimate(SizedEngine(), made, step, 1)  # type: ignore[arg-type]
    assert found.phases == {"generate": {"kv cache": tokens}}
    assert found.flops == {"generate": 32}  # of one step, whatever is evaluated


def test_a_long_evaluation_set_raises_the_quick_bound(folder: str, catalogue: Catalogue) -> None:
    def bound(**evaluation: object) -> float:
        config = configured(catalogue, "data.max_prompt_tokens=8", model={"path": folder}, eval=evaluation)
        return memory_check._bound(config, catalogue, plan(config, catalogue, on_gpus=False))

    long = {"name": "long", "path": "tasks.jsonl", "size": 4000, "max_new_tokens": 100}
    assert bound(sets=[long]) > bound(size=128)
