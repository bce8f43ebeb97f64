# SPDX-License-Identifier: Apache-2.0
"""Starting several things as one: whoever is left when it fails has ended by then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import InfrastructureError
from relax_core.rpc.waiting import start_all
from tests.unit.roles.simulated_run import SimulatedRun
from tests.unit.roles.virtual_time import run_virtual


class Starting:
    """Takes its time to start, to fail, and to clean up."""

    def __init__(self, seconds: float, fails: bool) -> None:
        self.seconds, self.fails, self.running = seconds, fails, False

    async def start(self) -> float:
        self.running = True
        try:
            await asyncio.sleep(self.seconds)
            if self.fails:
                raise InfrastructureError(f"after {self.seconds} s")
            return self.seconds
        except BaseException:
            await asyncio.sleep(0.1)
            raise
        finally:
            self.running = False


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=5), st.none() | st.integers(0, 5))
def test_results_come_in_order_or_all_tasks_are_cancelled(
    plan: list[tuple[int, bool]], cancel_after: int | None
) -> None:
    ones = [Starting(float(seconds), fails) for seconds, fails in plan]

    async def coroutine() -> None:
        starting = asyncio.ensure_future(start_all(*(one.start() for one in ones)))
        if cancel_after is not None:
            asyncio.get_running_loop().call_later(cancel_after + 0.5, starting.cancel)
        try:
            assert await starting == [one.seconds for one in ones]
            assert not any(one.fails for one in ones)
        except InfrastructureError:
            assert any(one.fails for one in ones)
        except asyncio.CancelledError:
            assert cancel_after is not None and cancel_after < max(one.seconds for one in ones)
        assert not any(one.running for one in ones)

    run_virtual(coroutine())


def test_a_rollout_whose_engine_does_not_start_leaves_no_engine_behind(tmp_path: Path) -> None:
    """Each of its lives starts both engines; the one that could is ended before the role starts anew."""
    simulation = SimulatedRun(tmp_path, steps=2, engine={"name": "scripted-engine", "refuses": "engine-1", "start_s": 5.0},
                      placement={"mode": "hybrid", "rollout": {"engines": 2}})  # fmt: skip
    with pytest.raises(BaseExceptionGroup):
        simulation.run()
    assert simulation.workers.alive["engine-0"].dead and simulation.workers.alive["engine-1"].dead
