# SPDX-License-Identifier: Apache-2.0
"""One Ray cluster for all tests of this folder. The last of these tests ends it: its monitors use a core's time until then."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from relax_core.testing.bus_training import TrainingSuite
from tests.unit.ray.cluster import ForeignCluster

SERVICE_RULES = {
    "test_admits_whole_groups_up_to_the_bound",
    "test_admits_nothing_to_an_engine_that_is_too_old_or_given_up",
    "test_admission_that_waits_continues_when_the_engine_takes_newer_weights",
    "test_a_group_is_claimed_only_when_all_its_samples_are_sealed",
    "test_unfinished_groups_that_fill_the_bus_can_always_be_finished",
    "test_a_failure_is_a_drop_and_never_a_zero",
    "test_a_group_with_too_few_valid_samples_is_dropped_and_replaced",
    "test_regenerating_issues_the_group_again_before_new_ones",
    "test_each_task_gets_every_group_once",
    "test_work_of_a_dead_producer_is_issued_again_unchanged",
    "test_a_producer_keeps_its_state_with_the_ledger",
    "test_released_rows_go_to_the_next_claim",
    "test_an_expired_lease_gives_its_rows_to_the_next_claim_and_fences_the_old_holder",
    "test_a_role_that_registers_again_fences_its_former_self",
    "test_a_sample_of_weights_that_a_rollback_gave_up_is_not_taken",
    "test_a_repeated_acknowledgement_is_harmless",
    "test_a_column_of_former_weights_is_made_again",
}
"""Rules of admission, whole groups and leases. The hub passes their calls to the service as they come."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the rules of admission, leases, steps and lineage to `tox -e faults`.

    This bus follows them with the service of the in-process bus, whose suite runs them in the gate. The gate runs the
    tests here of what the Ray client and the storages do themselves: put, read, cut, write, claim and wait.
    """
    rules = {name for name in vars(TrainingSuite) if name.startswith("test_")} | SERVICE_RULES
    for item in items:
        if item.parent is not None and item.parent.name == "TestRay" and item.name.partition("[")[0] in rules:
            item.add_marker("faults")


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """The address of a cluster that nobody of ours started; `RAY_ADDRESS` names it meanwhile."""
    with ForeignCluster(guarded=False) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment().items():
            patch.setenv(name, value)
        yield cluster.address


@pytest.fixture(scope="package")
def joined(address: str) -> Iterator[None]:
    """This process is on the cluster."""
    from relax_core.runners.ray.environment import settle

    settle()
    import ray

    ray.init(namespace="relax", log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    assert os.environ["RAY_ADDRESS"] == address
