# SPDX-License-Identifier: Apache-2.0
"""Threads that call the sinks and observers of plugins, so that slow, failing or hanging code never delays the run."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

from relax_core.api.role import Clock

MAX_FAILURES = 3
"""Number of exceptions, since the start or the last pause, after which calls pause."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 600.0
"""Length of the first pause, and of the longest: each pause without a successful call since the last is twice as long."""
MAX_PAUSES = 6
"""Number of pauses without a successful call, after which three more exceptions turn the worker off."""
MAX_QUEUED = 4096
Report = Callable[[str, str, str], None]
"""Callback for a failure; takes the worker's name, a sentence, and the traceback of the last error."""
Call = Callable[[], object]


class _Queued(NamedTuple):
    call: Call
    vital: bool = False
    last: bool = False
    """True for the last call, which is made also in a pause."""


class CallbackWorker:
    """A thread that runs the calls to one sink or observer in order; `give` never waits.

    Life cycle: `on <-> paused -> off`. Three exceptions pause the worker for a minute, and for longer after each pause
    without a successful call; calls in a pause are not made. An exception of a vital call, a call past its deadline, a
    full queue, or three exceptions after six such pauses turn the worker off for good. Every pause and the end are
    reported. An exception may be a SystemExit. The thread of a hanging call is abandoned.
    """

    def __init__(self, name: str, clock: Clock, report: Report, deadline_s: float = 30.0) -> None:
        self.name, self.on = name, True
        self._clock, self._report, self._deadline_s = clock, report, deadline_s
        self._calls: queue.Queue[_Queued | None] = queue.Queue(MAX_QUEUED)
        self._since: float | None = None
        self._given = self._returned = self._failed = self._skipped = 0
        self._raised = 0
        """Number of exceptions since the start or the last pause."""
        self._pauses = 0
        """Number of pauses since the last successful call."""
        self._paused_until = float("-inf")
        self._thread = threading.Thread(target=self._work, name=f"relax-{name}", daemon=True)
        self._thread.start()

    @property
    def failures(self) -> int:
        """Number of calls that raised, missed the deadline, or were not made because the worker was paused or off."""
        return self._failed + self._skipped if self.on else self._given - self._returned

    @property
    def works(self) -> bool:
        """True if the worker is neither off nor paused."""
        return self.on and self._clock.now() >= self._paused_until

    def give(self, call: Call, vital: bool = False) -> None:
        """Queue a call, unless the worker is off; turn it off if the running call is past its deadline.

        `vital`: the worker is turned off if the call raises, because later calls need it.
        """
        self._put(_Queued(call, vital))

    def check(self) -> None:
        """Turn the worker off if the running call is past its deadline."""
        since = self._since
        if self.on and since is not None and self._clock.now() - since > self._deadline_s:
            self._off(f"is off: one call took longer than {self._deadline_s:g} s")

    def close(self, last: Call | None = None) -> None:
        """Run the queued calls, then `last`, within the deadline; then end the thread."""
        close_all([(self, last)], self._deadline_s)

    def end(self, last: Call | None = None) -> None:
        """Let the thread end after the queued calls and `last`; do not wait for it."""
        if last is not None:
            self._put(_Queued(last, last=True))
        if self.on:
            try:
                self._calls.put_nowait(None)
            except queue.Full:
                self._off(f"is off: it is {MAX_QUEUED} calls behind")

    def join(self, wait_s: float, deadline_s: float) -> None:
        """Wait for the end of the thread; turn the worker off if the thread has not ended after `wait_s` seconds.

        `deadline_s`: the deadline that the report names; other workers may have used a part of it.
        """
        if self.on:
            self._thread.join(wait_s)
        if self.on and self._thread.is_alive():
            self._off(f"did not finish within {deadline_s:g} s")

    def _work(self) -> None:
        while self.on and (queued := self._calls.get()) is not None:
            if self._clock.now() < self._paused_until and not queued.last:
                self._failed += 1
                continue
            self._since = self._clock.now()
            failed: BaseException | None = None
            try:
                queued.call()
            except BaseException as error:  # a SystemExit would end the thread, and later calls would pile up
                failed = error
            self._since = None
            if failed is not None:
                self._fail(failed, queued.vital)
            elif self.on:
                self._returned += 1
                self._pauses = 0

    def _put(self, queued: _Queued) -> None:
        self.check()
        self._given += 1
        if not self.on:
            return
        if self._clock.now() < self._paused_until and not queued.last:
            self._skipped += 1
            return
        try:
            self._calls.put_nowait(queued)
        except queue.Full:
            self._off(f"is off: it is {MAX_QUEUED} calls behind")

    def _fail(self, error: BaseException, vital: bool) -> None:
        """Report an exception of a call; pause the worker, or turn it off, if the limit is reached."""
        self._failed += 1
        self._raised += 1
        said, frames = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        if vital:
            self._off(f"is off: it could not start: {said}", frames)
        elif self._raised < MAX_FAILURES:
            if self.on:
                self._report(self.name, f"raised {said}", frames)
        elif self._pauses == MAX_PAUSES:
            self._off(f"is off: it raised {MAX_FAILURES} times after {MAX_PAUSES} pauses, last {said}", frames)
        elif self.on:
            pause_s = min(FIRST_PAUSE_S * 2**self._pauses, LONGEST_PAUSE_S)
            self._raised, self._pauses = 0, self._pauses + 1
            self._paused_until = self._clock.now() + pause_s
            self._report(self.name, f"is paused for {pause_s:g} s: it raised {MAX_FAILURES} times, last {said}", frames)

    def _off(self, why: str, frames: str = "") -> None:
        if self.on:
            self.on = False
            with contextlib.suppress(queue.Full):
                self._calls.put_nowait(None)  # ends an idle thread
            self._report(self.name, why, frames)


def close_all(workers: Iterable[tuple[CallbackWorker, Call | None]], deadline_s: float) -> None:
    """Close workers at the same time, each after its last call; `deadline_s` bounds the wait for all of them."""
    workers = list(workers)
    for worker, last in workers:
        worker.end(last)
    until = time.monotonic() + deadline_s
    for worker, _ in workers:
        worker.join(max(0.0, until - time.monotonic()), deadline_s)
