# SPDX-License-Identifier: Apache-2.0
"""The bus with payloads in TransferQueue keeps what every bus promises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_transferqueue.store import Servers, TransferQueueStore

from relax_core.api import BusComponent, PayloadStore, Version
from relax_core.bus.service import open_bus
from relax_core.testing.bus import BusSuite
from relax_core.testing.bus_fixture import START, Scenario, run_on


class Reusing(BusComponent):
    """Stores on servers that are there."""

    def __init__(self, servers: Servers) -> None:
        super().__init__()
        self._servers = servers

    async def open_store(self) -> PayloadStore:
        return TransferQueueStore(self._servers, 60.0)


@pytest.mark.timeout(150)
class TestTransferQueue(BusSuite):
    component = "transferqueue"
    # Other processes would start servers of their own; the in-process bus shows that the service is deterministic.
    test_the_same_input_gives_the_same_result = None
    test_every_process_gives_the_same_result = None

    @pytest.fixture
    def made(self) -> BusComponent:
        return self.make()

    @pytest.fixture
    def on_bus(self, made: BusComponent, servers: Servers, tmp_path: Path) -> Callable[..., Any]:
        """As the suite's own, on servers that are started once."""

        def run(scenario: Scenario, version: Version = START, **settings: Any) -> Any:
            return run_on(partial(open_bus, Reusing(servers)), str(tmp_path), scenario, version, settings)

        return run
