# SPDX-License-Identifier: Apache-2.0
"""The Ray bus keeps the promises of every bus, through the hub and its storage actors; and what dies loses what it owned."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.api.bus import Bus, BusComponent, BusSettings
from relax_core.api.errors import InfrastructureError
from relax_core.api.trajectory import DropReason
from relax_core.api.weights import Version
from relax_core.testing.bus import BusSuite
from relax_core.testing.bus_fixture import SETTINGS, START, BusFixture, Open, Scenario, run_on

pytestmark = pytest.mark.ray


class OnCluster:
    """A bus component as a run's roles see it: opened in a hub, reached through clients."""

    def __init__(self, component: BusComponent, hub: Any = None) -> None:
        self._component, self.hub, self._ours = component, hub, hub is None

    async def open(self, settings: BusSettings, directory: str, version: Version) -> Bus:
        from relax_core.runners.ray.connection import asked

        self.hub = self.hub or _hub()
        opening = self.hub.open_bus.remote(self._component, settings, directory, version)
        self.store = await asked(opening, "hub", "open_bus", 60.0)
        return _Owned(self.hub, self.store, self._ours)


def _hub() -> Any:
    from relax_core.runners.ray.hub import CONCURRENCY, Hub

    return Hub.options(max_concurrency=CONCURRENCY).remote()


def _client(hub: Any, store: Any) -> Any:
    from relax_core.runners.ray.bus import reach_bus
    from relax_core.runners.ray.connection import RpcClient

    return reach_bus(RpcClient(hub, "hub"), store)


class _Owned:
    """A client that closes what it opened."""

    def __init__(self, hub: Any, store: Any, ends_hub: bool) -> None:
        self._hub, self._client, self._ends_hub = hub, _client(hub, store), ends_hub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def close(self) -> None:
        import ray

        await self._hub.close.remote()
        if self._ends_hub:
            ray.kill(self._hub)


class TestRay(BusSuite):
    component = "ray"
    # Other processes would start clusters of their own; the in-process bus shows that the service is deterministic.
    test_the_same_input_gives_the_same_result = None
    test_every_process_gives_the_same_result = None

    @pytest.fixture
    def made(self) -> BusComponent:
        return self.make()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def cluster(cls, joined: None) -> None:
        """Before anything of the suite."""

    @classmethod
    def opens(cls, component: BusComponent) -> Open:
        return OnCluster(component).open

    @pytest.fixture(scope="class")
    @classmethod
    def hub(cls) -> Iterator[Any]:
        import ray

        hub = _hub()
        yield hub
        ray.kill(hub)

    @pytest.fixture
    def on_bus(self, made: BusComponent, hub: Any, tmp_path: Path) -> Callable[..., Any]:
        def run(scenario: Scenario, version: Version = START, **settings: Any) -> Any:
            return run_on(OnCluster(made, hub).open, str(tmp_path), scenario, version, settings)

        return run


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_a_row_outlives_the_process_that_wrote_it(joined: None, tmp_path: Path) -> None:
    async def scenario(bus: Any, hub: Any, store: Any) -> None:
        import ray

        writer = _writer()
        os.kill(await writer.write.remote(hub, store), signal.SIGKILL)
        with pytest.raises(ray.exceptions.ActorDiedError):
            await writer.rest.remote()
        claim = await BusFixture(bus).claim()
        batch = await bus.read(claim, ("tokens",))
        assert [row.tolist() for row in batch.columns["tokens"].rows()] == [[0] * 4, [10] * 5]

    _with_bus(tmp_path, scenario)


@pytest.mark.faults
def test_rows_lost_with_their_storage_are_an_error_and_no_wait(joined: None, tmp_path: Path) -> None:
    async def scenario(bus: Any, hub: Any, store: Any) -> None:
        import ray

        lab = BusFixture(bus)
        await lab.produce(1)
        claim = await lab.claim()
        ray.kill(store._actors[0])
        store.sweep()
        async with asyncio.timeout(60):
            with pytest.raises(InfrastructureError, match="bus storage"):
                await bus.read(claim, ("tokens",))
            issue = (await lab.admit(1))[0]
            with pytest.raises(InfrastructureError, match="bus storage"):
                await lab.put(issue.attempts)

    _with_bus(tmp_path, scenario)


@pytest.mark.faults
def test_a_storage_that_is_killed_is_there_again_with_its_blocks_while_a_writer_and_a_reader_wait(
    joined: None, tmp_path: Path
) -> None:
    async def scenario(bus: Any, hub: Any, store: Any) -> None:
        lab, elsewhere = BusFixture(bus), _client(hub, _elsewhere(store))
        await lab.produce(1)
        claim = await lab.claim()
        issue = (await lab.admit(1))[0]
        storage = store._actors[0]
        first = await storage.__ray_call__.remote(_pid)
        os.kill(first, signal.SIGKILL)
        _, read = await asyncio.gather(lab.put(issue.attempts), elsewhere.read(claim, ("tokens",)))
        assert [row.tolist() for row in read.columns["tokens"].rows()] == [[0] * 4, [10] * 5]
        assert await storage.__ray_call__.remote(_pid) != first
        for reader in (bus, elsewhere):
            assert (
                len((await reader.read(await lab.claim(f"of {reader is bus}", 2), ("tokens",))).columns["tokens"]) == 4
            )
        await bus.drop(issue.attempts, DropReason.FILTERED)
        async with asyncio.timeout(60):
            while _blocks(store._folders[0].path) != 1:
                await asyncio.sleep(0.01)

    _with_bus(tmp_path, scenario)


@pytest.mark.faults
def test_blocks_in_a_killed_storages_memory_are_reported_as_lost(joined: None, tmp_path: Path) -> None:
    async def scenario(bus: Any, hub: Any, store: Any) -> None:
        elsewhere = _client(hub, _elsewhere(store))
        await BusFixture(elsewhere).produce(1)
        claim = await BusFixture(bus).claim()
        os.kill(await store._actors[0].__ray_call__.remote(_pid), signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="bus storage: blocks .* were lost with the process"):
            await bus.read(claim, ("tokens",))

    _with_bus(tmp_path, scenario)


def test_a_dead_hub_is_an_error_and_no_wait(joined: None, tmp_path: Path) -> None:
    async def scenario(bus: Any, hub: Any, store: Any) -> None:
        import ray

        waiting = asyncio.create_task(BusFixture(bus).nothing_for("advantages"))
        ray.kill(hub)
        async with asyncio.timeout(60):
            for call in (waiting, bus.version()):
                with pytest.raises(InfrastructureError, match="hub died"):
                    await call
        store.sweep()

    _with_bus(tmp_path, scenario, closes=False)


def test_large_columns_come_back_bit_for_bit_on_the_same_and_on_another_machine(joined: None, tmp_path: Path) -> None:
    async def scenario(bus: Any, hub: Any, store: Any) -> None:
        from relax_core.api.batch import Ragged

        elsewhere, values = _client(hub, _elsewhere(store)), np.arange(1 << 20, dtype=np.float32).reshape(-1, 4)
        half = len(values) // 2
        for writer, readers in ((bus, (bus, elsewhere)), (elsewhere, (elsewhere,))):
            lab = BusFixture(writer)
            await lab.produce(1)
            await writer.write(await lab.claim(), {"hidden": Ragged(values, np.array([half, half]))})
            again = await lab.claim("other", needs=("hidden",))
            for reader in readers:
                np.testing.assert_array_equal((await reader.read(again, ("hidden",))).columns["hidden"].values, values)

    _with_bus(tmp_path, scenario)


def test_read_arrays_outlive_their_block_and_a_closed_bus_leaves_no_file(joined: None, tmp_path: Path) -> None:
    folders = []

    async def scenario(bus: Any, hub: Any, store: Any) -> None:
        lab = BusFixture(bus)
        (folder,) = store._folders
        folders.append(Path(folder.path))
        (issue,) = await lab.produce(1)
        read = (await bus.read(await lab.claim(), ("tokens",))).columns["tokens"]
        assert _blocks(folder.path) == 1
        await bus.drop(issue.attempts, DropReason.FILTERED)
        async with asyncio.timeout(60):
            while _blocks(folder.path):
                await asyncio.sleep(0.01)
        assert [row.tolist() for row in read.rows()] == [[0] * 4, [10] * 5]

    _with_bus(tmp_path, scenario)
    assert not folders[0].exists()


async def test_a_runner_removes_what_storages_left_whose_hub_is_dead(tmp_path: Path) -> None:
    from relax_core.registry.catalogue import Catalogue
    from relax_core.runners.ray.block_folder import BlockFolder, new_folder_name
    from relax_core.runners.ray.bus import RemoteStore
    from relax_core.runners.ray.runner import RayRunner

    folder = BlockFolder.make(new_folder_name(), tmp_path)
    assert folder is not None
    runner = RayRunner(Catalogue.load())
    runner._store = RemoteStore([], [folder])
    await runner.close()
    assert not folder.here


async def test_a_hub_stays_on_the_drivers_node_and_opens_no_directory_in_which_it_misses_the_drivers_mark(
    joined: None, tmp_path: Path
) -> None:
    import ray

    from relax_core.runners.launch import Launch
    from relax_core.runners.ray.connection import asked
    from relax_core.runners.ray.hub import Hub, hub_options

    options = hub_options("run")
    strategy = options["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (ray.get_runtime_context().get_node_id(), False)
    hub = Hub.options(**options).remote()  # type: ignore[attr-defined]
    launch = Launch("run", str(tmp_path / "local-here"), {}, None)  # type: ignore[arg-type]
    with pytest.raises(InfrastructureError, match=r"local-here: .*another directory than the driver.*--run-dir"):
        await asked(hub.open.remote(launch, ".mark-of-the-driver"), "hub", "open", 60.0)
    assert not (tmp_path / "local-here").exists(), "no ledger was begun there"
    ray.kill(hub)


def _pid(storage: Any) -> int:
    return os.getpid()


def _elsewhere(store: Any) -> Any:
    """The store as it is seen from a machine without its folders."""
    from relax_core.runners.ray.bus import RemoteStore

    return RemoteStore(store._actors, [None for _ in store._folders])


def _blocks(folder: str) -> int:
    return len([name for name in os.listdir(folder) if name.isdigit()])


def _with_bus(directory: Path, scenario: Callable[[Any, Any, Any], Awaitable[None]], closes: bool = True) -> None:
    """A scenario that is given the bus, the hub and its payload store."""
    from relax_core.runners.ray.bus import RayBus

    async def main() -> None:
        component = OnCluster(RayBus())
        bus = await component.open(SETTINGS, str(directory), START)
        try:
            await scenario(bus, component.hub, component.store)
        finally:
            if closes:
                await bus.close()

    asyncio.run(main())


def _writer() -> Any:
    """A process of its own that puts one group's rows."""
    import ray

    @ray.remote(num_cpus=0, max_restarts=0)
    class Writer:
        async def write(self, hub: Any, store: Any) -> int:
            await BusFixture(_client(hub, store)).produce(1)
            return os.getpid()

        async def rest(self) -> None:
            await asyncio.Event().wait()

    return Writer.remote()
