# SPDX-License-Identifier: Apache-2.0
"""One child with TransferQueue's servers for all tests of this folder; a store keeps to its own partition of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from relax_plugin_transferqueue.child import ChildServers

from relax_core.testing.bus_training import TrainingSuite


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the rules of steps and lineage to `tox -e faults`: this bus follows them with the in-process bus's service."""
    rules = {name for name in vars(TrainingSuite) if name.startswith("test_")}
    for item in items:
        if item.parent is not None and item.parent.name == "TestTransferQueue" and item.name.partition("[")[0] in rules:
            item.add_marker("faults")


class Kept(ChildServers):
    """Servers that outlive the stores on them."""

    async def close(self) -> None:
        """When the tests are over."""


@pytest.fixture(scope="session")
def servers() -> Iterator[Kept]:
    started = asyncio.run(ChildServers.start(2))
    yield Kept(started._process, {"controller": started.controller, "units": started.units})
    asyncio.run(started.close())
