# SPDX-License-Identifier: Apache-2.0
"""Authors' code releases what it took for a whole process, once, when that ends in order; a hanging end is cut off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relax_core.api import Chosen, SystemClock
from relax_core.config.run_config import EnvironmentChoice, RewardChoice
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.scorer import RewardScorer
from relax_core.rpc import isolated_pool
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool

ENDING = '''
import time
from pathlib import Path
from relax_core.api import Environment, Options, Reward


class EndOptions(Options):
    """Options."""

    log: str = ""
    """File to which each end is written."""
    hangs: bool = False
    """Its end takes for ever."""


def write(options, text):
    with Path(options.log).open("a") as file:
        file.write(text)
    if options.hangs:
        time.sleep(1000)


class Apart(Environment[EndOptions]):
    @classmethod
    async def open(cls, options):
        return options

    @classmethod
    async def shut(cls, shared):
        write(shared, "shut.")


class Here(Apart):
    in_process = True


class Failing(Apart):
    in_process = True

    @classmethod
    async def shut(cls, shared):
        write(shared, "shut.")
        raise RuntimeError("no end")


class Threaded(Reward[EndOptions]):
    def score(self, task, trajectory):
        return 1.0

    def close(self):
        write(self.options, "closed.")


class Waiting(Reward[EndOptions]):
    async def score(self, task, trajectory):
        return 1.0

    async def close(self):
        write(self.options, "closed.")
'''


async def ended(folder: Path, kind: str, name: str, **options: bool) -> str:
    """Start and stop a pool of one process; give what its ends have written."""
    plugin, log = folder / "ending.py", folder / "log"
    plugin.write_text(ENDING)
    workers = LocalWorkers([str(plugin)])
    chosen = Chosen(kind, name, {"log": str(log), **options})
    pool: EnvironmentPool | RewardScorer = RewardScorer(
        [RewardChoice(chosen=chosen)], ProcessStarter(workers), SystemClock()
    )
    if kind == "environment":
        build = Catalogue.load([str(plugin)]).build
        pool = EnvironmentPool(EnvironmentChoice(chosen=chosen), ProcessStarter(workers), build=build)
    try:
        async with asyncio.timeout(120):
            await pool.start()
            await pool.stop()
            await pool.stop()
    finally:
        await workers.close()
    return log.read_text()


@pytest.mark.parametrize("name", ["apart", "here", "failing"])
async def test_an_environment_shuts_its_shared_set_up_once_a_process(tmp_path: Path, name: str) -> None:
    assert await ended(tmp_path, "environment", name) == "shut."


@pytest.mark.parametrize("name", ["threaded", "waiting"])
async def test_a_reward_is_closed_once_a_process(tmp_path: Path, name: str) -> None:
    assert await ended(tmp_path, "reward", name) == "closed."


async def test_an_end_that_hangs_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_pool, "END_S", 0.2)
    assert await ended(tmp_path, "reward", "waiting", hangs=True) == "closed."
