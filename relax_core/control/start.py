# SPDX-License-Identifier: Apache-2.0
"""The one way to run what was prepared, for the command line and for Python: pick the runner, conduct, report."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

from relax_core.control.conduct import Conductor
from relax_core.control.prepare import Prepared
from relax_core.control.runner import make_runner
from relax_core.control.succession import Succession
from relax_core.observe.recorder import Display
from relax_core.runners.launch import Runner

STOPS = (signal.SIGINT, signal.SIGTERM)
Report = Callable[[str], None]


def run(prepared: Prepared, display: Display | None = None, *, signals: bool = True) -> dict[str, Any]:
    """Conduct a prepared run to its end in a new event loop; returns the summary or raises what made it fail.

    One that was ended by a second signal has the status `interrupted`.
    """
    runner = prepared.ahead.take() if prepared.ahead else make_runner(prepared.config, prepared.catalogue)
    with asyncio.Runner() as loop, contextlib.suppress(asyncio.CancelledError):
        return loop.run(_run(prepared, runner, display, signals))
    return prepared.directory.read("summary") or {"status": "interrupted"}


async def _run(prepared: Prepared, runner: Runner, display: Display | None, signals: bool) -> dict[str, Any]:
    conductor = Succession(prepared, runner, display) if prepared.stages else Conductor(prepared, runner, display)
    with _listening(conductor) if signals else contextlib.nullcontext():
        return await conductor.run()


@contextlib.contextmanager
def _listening(conductor: Conductor | Succession) -> Any:
    """Ctrl-C and SIGTERM ask for a stop; a second one ends at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked: list[str] = []

    def take(name: str) -> None:
        asked.append(name)
        if len(asked) == 1:
            conductor.stop(name)
        elif task is not None:
            task.cancel()

    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        loop.add_signal_handler(number, take, number.name)
    try:
        yield
    finally:
        for number in STOPS:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
