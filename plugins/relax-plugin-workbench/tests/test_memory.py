# SPDX-License-Identifier: Apache-2.0
"""A run whose processes need more than the free memory is refused, with the field to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from relax_plugin_workbench import memory
from relax_plugin_workbench.memory import FITS, LIBRARIES, ProcessNeed, memory_budgets

from relax_core.api.checks import CheckFinding, PreflightFacts
from relax_core.api.engine import EngineSpec
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Estimate, WorkerGroup, Workload
from relax_core.control import preflight
from relax_core.control.data_check import PlanContext
from relax_core.control.planner import plan
from relax_core.registry.catalogue import Catalogue
from relax_core.testing.trainer import tiny_model
from tests.unit.control.conftest import configured


def checked(folder: str, free: int, *overrides: str, starts: bool = True) -> list[CheckFinding]:
    catalogue = Catalogue.load()
    config = configured(catalogue, *overrides, model={"path": folder}, rollout={"max_new_tokens": 8})
    placed = plan(config, catalogue, on_gpus=False)
    return list(memory.memory(PreflightFacts(config.dump(), placed, free, starts)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(memory, "longest_prompt", lambda *_: 8)  # its tasks want a tokenizer
    return tiny_model(tmp_path)


def test_a_plan_that_cannot_fit_is_refused_unless_forced(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 29)
    (found,) = checked(folder, 1 << 29)
    assert (found.name, found.state) == (FITS, "failed") and "host memory, which has 0.5 GiB available" in found.found
    assert found.field and "placement.check_memory=false" in found.advice
    (found,) = checked(folder, 1 << 29, starts=False)
    assert found.state == "warning"
    assert checked(folder, 1 << 29, "placement.check_memory=false") == []
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 40)  # processes that ended meanwhile have freed memory
    assert [found.state for found in checked(folder, 1 << 29)] == ["ok"]


def test_the_check_of_the_installed_plugin_refuses_a_run(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, preflight):
        monkeypatch.setattr(module, "free_memory", lambda: 1 << 29)
    catalogue = Catalogue.load()
    config = configured(catalogue, model={"path": folder}, rollout={"max_new_tokens": 8})
    placed = plan(config, catalogue, on_gpus=False)
    with pytest.raises(ConfigError, match=r"0\.5 GiB available; the largest part is .*placement.check_memory=false"):
        preflight.preflight(config, catalogue, placed, starts=True)
    assert any(notice.startswith(f"{FITS}: ") for notice in preflight.preflight(config, catalogue, placed))


def test_a_model_much_smaller_than_free_memory_is_not_checked(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "process_needs", None)
    assert [found.state for found in checked(folder, 1 << 40)] == ["ok"]


def test_the_folder_of_an_unused_teacher_need_not_exist(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "process_needs", None)
    assert [found.state for found in checked(folder, 1 << 40, "teachers=[{path='not-made'}]")] == ["ok"]


def test_a_step_too_large_for_any_estimate_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_bound", lambda *_: 2.0**2000)
    (found,) = checked(folder, 1 << 40)
    assert (found.state, found.field) == ("failed", "rollout") and "times" in found.found


@pytest.mark.parametrize(("ranks", "estimated"), [(1, [0]), (3, [0, 2])])
def test_equal_ranks_are_estimated_once(
    ranks: int, estimated: list[int], catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def estimate(trainer: object, context: object, group: object, rank: int, step: object) -> Estimate:
        seen.append(rank)
        return Estimate({"train": {"parameters": rank + 1}})

    monkeypatch.setattr(memory, "_rank_estimate", estimate)
    config = configured(catalogue, f"placement.actor.ranks={ranks}")
    placed = plan(config, catalogue, on_gpus=False)
    (need,) = memory.process_needs(config, catalogue, placed, 8, [placed.groups["actor"]])
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
    made = PlanContext(config, placed, catalogue.build)
    step = memory.largest_step(config, placed, 8)
    found = memory._engine_estimate(SizedEngine(), made, step, 1)  # type: ignore[arg-type]
    assert found.phases == {"generate": {"kv cache": tokens}}
    assert found.flops == {"generate": 32}  # of one step, whatever is evaluated


def test_a_long_evaluation_set_raises_the_quick_bound(folder: str, catalogue: Catalogue) -> None:
    def bound(**evaluation: object) -> float:
        config = configured(catalogue, "data.max_prompt_tokens=8", model={"path": folder}, eval=evaluation)
        return memory._bound(config.dump(), plan(config, catalogue, on_gpus=False), lambda *_: 0)

    long = {"name": "long", "path": "tasks.jsonl", "size": 4000, "max_new_tokens": 100}
    assert bound(sets=[long]) > bound(size=128)


TRAIN = Estimate({
    "train": {"parameters": 10, "optimizer": 20, "gradients": 10, "activations": 100},
    "publish": {"parameters": 10, "optimizer": 20, "published": 10},
})  # fmt: skip
GENERATE = Estimate({"generate": {"parameters": 10, "kv cache": 50, "logits": 5}})


def need(name: str, told: Estimate, devices: set[str], offloads: tuple[str, ...] = (), size: int = 1) -> ProcessNeed:
    return ProcessNeed(WorkerGroup(name, size, devices=frozenset(devices), offloads=offloads), told, told)  # type: ignore[arg-type]


def test_groups_with_devices_of_their_own_are_added_up() -> None:
    (host,) = memory_budgets([need("actor", TRAIN, {"cpu:0"}, size=2), need("rollout", GENERATE, {"cpu:1"})], 0, {})
    assert host.needed == 3 * LIBRARIES + 2 * 140 + 65 + 10  # what was published lies there once
    assert host.largest == "activations" and host.fits


def test_a_waiting_member_keeps_the_parts_that_cannot_be_offloaded() -> None:
    actor, rollout = need("actor", TRAIN, {"cpu:0"}), need("rollout", GENERATE, {"cpu:0"}, ("kv",))
    (host,) = memory_budgets([actor, rollout], 0, {})
    assert host.needed == 2 * LIBRARIES + 10 + 140 + 10
    (host,) = memory_budgets([actor, need("rollout", GENERATE, {"cpu:0"})], 0, {})
    assert host.needed == 2 * LIBRARIES + 10 + 140 + 60


def test_each_device_is_checked_separately() -> None:
    found = memory_budgets(
        [need("actor", TRAIN, {"gpu:0", "gpu:1"}, size=2), need("rollout", GENERATE, {"gpu:1"})], 0, {"gpu:0": 200}
    )
    assert [(budget.name, budget.needed, budget.available) for budget in found[1:]] == [
        ("gpu:0", 140, 200),
        ("gpu:1", 200, 0),
    ]


def test_a_plan_that_cannot_fit_is_refused_with_the_fix() -> None:
    (host,) = memory_budgets([need("actor", TRAIN, {"cpu:0"})], LIBRARIES, {})
    refusal = str(host.refusal)
    assert refusal.startswith("batch.tokens_per_micro_batch: got a plan that needs ") and " of host memory" in refusal


def test_groups_without_an_estimate_are_left_out() -> None:
    unknown = ProcessNeed(WorkerGroup("actor", 1, devices=frozenset({"cpu:0"})), None, None, "not estimated by other")
    (host,) = memory_budgets([unknown], 0, {})
    assert host.needed == 0
