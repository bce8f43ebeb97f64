# SPDX-License-Identifier: Apache-2.0
"""What processes need together: those that take turns beside what the others keep, and a refusal that says what to change."""

from __future__ import annotations

import pytest

from relax_core.api.errors import ConfigError
from relax_core.api.plan import Estimate, WorkerGroup
from relax_core.control.memory_check import LIBRARIES, ProcessNeed, memory_budgets

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
    with pytest.raises(ConfigError, match=r"batch.tokens_per_micro_batch: got a plan that needs .* of host memory"):
        host.check()


def test_groups_without_an_estimate_are_left_out() -> None:
    unknown = ProcessNeed(WorkerGroup("actor", 1, devices=frozenset({"cpu:0"})), None, None, "not estimated by other")
    (host,) = memory_budgets([unknown], 0, {})
    assert host.needed == 0
