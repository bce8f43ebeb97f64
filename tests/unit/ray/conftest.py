# SPDX-License-Identifier: Apache-2.0
"""One Ray cluster for all tests of this folder: started as others would start it, joined by address, ended with them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from relax_core.testing.bus_training import TrainingSuite
from tests.unit.ray.cluster import ForeignCluster


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the rules of steps and lineage to `tox -e faults`: this bus follows them with the in-process bus's service."""
    rules = {name for name in vars(TrainingSuite) if name.startswith("test_")}
    for item in items:
        if item.parent is not None and item.parent.name == "TestRay" and item.name.partition("[")[0] in rules:
            item.add_marker("faults")


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The address of a cluster that nobody of ours started; `RAY_ADDRESS` names it meanwhile."""
    with ForeignCluster(guarded=False) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment().items():
            patch.setenv(name, value)
        yield cluster.address


@pytest.fixture(scope="session")
def joined(address: str) -> Iterator[None]:
    """This process is on the cluster."""
    from relax_core.runners.ray.environment import settle

    settle()
    import ray

    ray.init(namespace="relax", log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    assert os.environ["RAY_ADDRESS"] == address
