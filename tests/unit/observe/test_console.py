# SPDX-License-Identifier: Apache-2.0
"""A command names what it waits for at its start, and answers a signal at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextvars import copy_context
from functools import partial

import pytest

from relax_core.cli.terminal import STOPPING, Interrupted, asking, stop_command
from relax_core.observe.console import INTERRUPTS, Interrupts, open_waits, print_waits, run_to_end, waiting_for
from relax_core.observe.process_log import bound
from tests.clocks import HandClock


@pytest.fixture(autouse=True)
def commands_signals() -> Iterator[None]:
    """Handle signals as the command line does."""
    before = {number: signal.signal(number, stop_command) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that signals print."""
    lines: list[str] = []
    monkeypatch.setattr("relax_core.observe.console.tell", lines.append)
    return lines


def test_open_waits_are_named_with_their_ages_and_ended_waits_are_not() -> None:
    clock, printed, doing = HandClock(), list[str](), {"actor": "loading the model"}
    tick = partial(print_waits, printed.append, clock.now)
    tick()
    with waiting_for(lambda: f"starting actor ({doing['actor']})", clock.now):
        clock.at += 5
        tick()
        doing["actor"] = "ready\x1b[2J"
        with bound(role="rollout"), waiting_for("starting engine engine-0", clock.now):
            clock.at += 5
            tick()
            assert open_waits("rollout") == [("starting engine engine-0", 105.0)] and not open_waits("actor")
    tick()
    assert printed == [
        "relax: starting actor (loading the model), 5 s",
        "relax: starting actor (ready\\u001b[2J), 10 s; starting engine engine-0, 5 s",
    ]


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_prints_a_line_and_ends_the_command_and_a_second_ctrl_c_kills_it(
    number: signal.Signals, printed: list[str]
) -> None:
    with pytest.raises(Interrupted) as interrupted:
        signal.raise_signal(number)
    again = "; press Ctrl-C again to end at once" if number == signal.SIGINT else ""
    assert interrupted.value.number == number
    assert [line.removeprefix("\x1b[?25h\n") for line in printed] == [f"relax: stopping after {number.name}{again}"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_a_signal_cancels_the_commands_coroutine_and_not_the_task_that_runs(printed: list[str]) -> None:
    ended: list[str] = []

    async def task() -> None:
        signal.raise_signal(signal.SIGTERM)
        ended.append("the statement after the signal")
        await asyncio.Event().wait()

    async def command() -> None:
        try:
            await asyncio.create_task(task())
        finally:
            ended.append("workers")

    def body() -> None:
        INTERRUPTS.set(Interrupts())
        run_to_end(command())

    with pytest.raises(KeyboardInterrupt):
        copy_context().run(body)
    assert ended == ["the statement after the signal", "workers"] and len(printed) == 1


def test_a_command_that_asks_what_to_do_gets_every_ctrl_c_without_a_line(printed: list[str]) -> None:
    with asking():
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            with pytest.raises(Interrupted):
                signal.raise_signal(number)
    assert not printed and signal.getsignal(signal.SIGINT) is stop_command
