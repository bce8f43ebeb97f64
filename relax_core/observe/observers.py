# SPDX-License-Identifier: Apache-2.0
"""Threads that call the sinks and observers of plugins, so that slow, failing or hanging code never delays the run."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future

from relax_core.api.role import Clock

MAX_FAILURES = 3
MAX_QUEUED = 4096
Report = Callable[[str, str, str], None]
"""Callback for a failure; takes the worker's name, a sentence, and the traceback of the last error."""


class CallbackWorker:
    """A thread that runs the calls to one sink or observer in order; `give` never waits.

    Life cycle: `on -> off`. Three exceptions, a call past its deadline, or a full queue turn the worker off for good,
    which is reported once. The thread of a hanging call is abandoned.
    """

    def __init__(self, name: str, clock: Clock, report: Report, deadline_s: float = 30.0) -> None:
        self.name, self.on = name, True
        self._clock, self._report, self._deadline_s = clock, report, deadline_s
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(MAX_QUEUED)
        self._since: float | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._work, name=f"relax-{name}", daemon=True)
        self._thread.start()

    def give(self, call: Callable[[], object]) -> None:
        """Queue a call, unless the worker is off; turn it off if the running call is past its deadline."""
        self.check()
        if not self.on:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._off(f"is off: it is {MAX_QUEUED} calls behind")

    def ask(self, call: Callable[[], object]) -> None:
        """Make a call and wait for it within the deadline; if it fails, turn the worker off and raise its exception."""
        answer: Future[None] = Future()

        def run() -> None:
            try:
                call()
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        self._calls.put_nowait(run)
        try:
            answer.result(self._deadline_s)
        except Exception:
            self.on = False
            raise

    def check(self) -> None:
        """Turn the worker off if the running call is past its deadline."""
        since = self._since
        if self.on and since is not None and self._clock.now() - since > self._deadline_s:
            self._off(f"is off: one call took longer than {self._deadline_s:g} s")

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Run the queued calls, then `last`, within the deadline; then end the thread."""
        if last is not None:
            self.give(last)
        if self.on:
            try:
                self._calls.put(None, timeout=self._deadline_s)
            except queue.Full:
                self._off(f"is off: it is {MAX_QUEUED} calls behind")
            self._thread.join(self._deadline_s)
        if self.on and self._thread.is_alive():
            self._off(f"did not finish within {self._deadline_s:g} s")

    def _work(self) -> None:
        while self.on and (call := self._calls.get()) is not None:
            self._since = self._clock.now()
            try:
                call()
            except Exception as error:
                self._failures += 1
                frames = "".join(traceback.format_exception(error))
                if self._failures >= MAX_FAILURES:
                    self._off(f"is off: it raised {MAX_FAILURES} times, last {type(error).__name__}: {error}", frames)
                elif self.on:
                    self._report(self.name, f"raised {type(error).__name__}: {error}", frames)
            finally:
                self._since = None

    def _off(self, why: str, frames: str = "") -> None:
        if self.on:
            self.on = False
            with contextlib.suppress(queue.Full):
                self._calls.put_nowait(None)  # ends an idle thread
            self._report(self.name, why, frames)
