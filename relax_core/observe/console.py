# SPDX-License-Identifier: Apache-2.0
"""The part of the terminal that all commands share: answers to interrupts, and lines about the waits of a start."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from signal import Signals
from typing import TYPE_CHECKING, Any, TypeVar

from relax_core.api.errors import printable

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

EVERY_S = 5.0
"""Seconds between two lines about the open waits."""
_waits: dict[object, tuple[str | Callable[[], str], str, float]] = {}
"""Each open wait of this process: what it waits for, the role that waits or "", and when it began."""


class Interrupts:
    """Interrupts of one coroutine by a signal handler or another thread."""

    def __init__(self) -> None:
        self._obey: Callable[[], object] | None = None
        self.sent = False

    def send(self) -> bool:
        """Interrupt the coroutine, or the next one if none runs; return True if one runs."""
        self.sent, obey = True, self._obey
        if obey is not None:
            obey()
        return obey is not None

    @contextmanager
    def obeyed_by(self, obey: Callable[[], object]) -> Iterator[None]:
        """Call `obey` at each interrupt while the body runs, in the thread that calls `send`; also for an earlier interrupt."""
        self._obey = obey
        if self.sent:
            obey()
        try:
            yield
        finally:
            self._obey = None


INTERRUPTS: ContextVar[Interrupts] = ContextVar("interrupts")
"""The interrupts of this thread; unset if Python alone handles interrupts."""


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop; at an interrupt of this thread, cancel it and raise KeyboardInterrupt.

    A signal handler must not raise inside a loop: the exception would end any task, and be logged with a traceback.
    """
    import asyncio

    async def cancellable(interrupts: Interrupts) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with interrupts.obeyed_by(lambda: loop.call_soon_threadsafe(task.cancel)):
            return await main

    interrupts = INTERRUPTS.get(None)
    if interrupts is None:
        return asyncio.run(main)
    try:
        return asyncio.run(cancellable(interrupts))
    except asyncio.CancelledError:
        if interrupts.sent:
            raise KeyboardInterrupt from None
        raise


def say_stopping(number: int) -> None:
    """Print that a signal stops the command. Safe in a signal handler."""
    begin = "\x1b[?25h\n" if os.isatty(2) else ""  # show the cursor, and leave the line with ^C
    again = "; press Ctrl-C again to end at once" if number == Signals.SIGINT else ""
    tell(f"{begin}relax: stopping after {Signals(number).name}{again}")


def tell(line: str) -> None:
    """Print a line from any thread or signal handler.

    While a live display replaces `sys.stderr`, another thread prints: the interrupted code may hold the display's lock.
    """
    if sys.stderr is not sys.__stderr__:
        _thread.start_new_thread(_print, (line,))
        return
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def waiting_for(what: str | Callable[[], str], now: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Name what this process waits for while the body runs, such as "starting worker engine-0"."""
    from relax_core.observe.process_log import bound_fields  # imported late: signal handlers need this module early

    key = object()
    _waits[key] = (what, str(bound_fields().get("role", "")), now())
    try:
        yield
    finally:
        del _waits[key]


def open_waits(role: str | None = None) -> list[tuple[str, float]]:
    """Return what this process, or one role in it, waits for and since when; the oldest wait first."""
    found = [(what, since) for what, owner, since in list(_waits.values()) if role in (None, owner)]
    return [(what if isinstance(what, str) else what(), since) for what, since in found]


def print_waits(say: Callable[[str], object] = tell, now: Callable[[], float] = time.monotonic) -> None:
    """Print what this process waits for, on one line; nothing if it does not wait."""
    if waits := open_waits():
        say(printable("relax: " + "; ".join(f"{what}, {now() - since:.0f} s" for what, since in waits)))
