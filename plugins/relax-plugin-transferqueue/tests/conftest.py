# SPDX-License-Identifier: Apache-2.0
"""One child with TransferQueue's servers for all tests of this folder; a store keeps to its own partition of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from relax_plugin_transferqueue.child import ChildServers


class Kept(ChildServers):
    """Servers that outlive the stores on them."""

    async def close(self) -> None:
        """When the tests are over."""


@pytest.fixture(scope="session")
def servers() -> Iterator[Kept]:
    started = asyncio.run(ChildServers.start(2))
    yield Kept(started._process, {"controller": started.controller, "units": started.units})
    asyncio.run(started.close())
