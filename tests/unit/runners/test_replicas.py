# SPDX-License-Identifier: Apache-2.0
"""When the process of a role dies, another one starts within a budget, or the run ends."""

from __future__ import annotations

from relax_core.runners.context import MAX_RESTARTS, REFILL_S
from relax_core.runners.replicas import ReplicaTracker


def test_a_role_runs_again_and_learns_how_long_no_process_ran_it() -> None:
    replicas = ReplicaTracker(["rollout", "actor"])
    assert replicas.missing() == ("rollout", "actor")
    assert replicas.enter("rollout", 1, 0.0) is None
    loss = replicas.lost("rollout", 1, 10.0)
    assert loss is not None and not loss.fatal and "pid 1" in loss.reason
    assert replicas.lost("rollout", 1, 11.0) is None, "told twice"
    assert replicas.absent("rollout", 10.0)
    assert replicas.enter("rollout", 2, 14.0) == 10.0
    assert replicas.is_current("rollout", 2) and not replicas.is_current("rollout", 1)
    assert replicas.lost("rollout", 1, 15.0) is None, "of a former replica"
    assert not replicas.absent("rollout", 10.0)


def test_a_process_that_dies_after_its_role_is_not_reported_as_lost() -> None:
    replicas = ReplicaTracker(["actor"])
    replicas.enter("actor", 1, 0.0)
    assert replicas.end("actor") and not replicas.end("actor") and replicas.has_ended("actor")
    assert replicas.lost("actor", 1, 1.0) is None


def test_a_role_that_dies_too_often_ends_the_run_but_old_deaths_are_forgiven() -> None:
    replicas = ReplicaTracker(["rollout"])

    def die(pid: int, now: float) -> bool:
        replicas.enter("rollout", pid, now)
        loss = replicas.lost("rollout", pid, now)
        return loss is not None and loss.fatal

    assert [die(pid, float(pid)) for pid in range(1, MAX_RESTARTS + 1)] == [False] * MAX_RESTARTS
    assert not die(50, REFILL_S + MAX_RESTARTS + 1.0)
    assert [die(pid, REFILL_S + pid) for pid in range(60, 60 + MAX_RESTARTS)][-1]
