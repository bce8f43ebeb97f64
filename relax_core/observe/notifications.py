# SPDX-License-Identifier: Apache-2.0
"""Messages to people through Apprise when a run starts, stalls, diverges, recovers or ends.

The recorder passes events on without waiting. Each address has a thread of its own and a deadline per message. Messages
contain no secrets and no control characters, and texts of samples only if `notify.samples` is set.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relax_core.api import events
from relax_core.api.errors import InfrastructureError, PluginError, printable
from relax_core.api.events import Event
from relax_core.api.role import Clock, Heartbeat
from relax_core.config.tables import NoticeKind, NotifyTable
from relax_core.observe.event_log import describe
from relax_core.observe.observers import CallbackWorker, Report
from relax_core.observe.records import read_frames
from relax_core.observe.redaction import Redactor

LONGEST = 1_500
"""Largest number of characters in a message; most services accept this length."""
LONGEST_SAMPLE = 600
LATE_S = 30.0
"""Seconds past its deadline after which a wait is reported, since the heartbeat that ends it may be late."""


class NoticeLimiter:
    """A token bucket that limits messages and counts suppressed messages.

    Invariants:
    - At most `burst` messages are sent at once, then one more per `every_s`. Urgent messages are always sent.
    - Each suppressed message is counted in exactly one sent message: the next message that is sent.
    """

    def __init__(self, burst: int, every_s: float) -> None:
        self._burst, self._every_s = burst, every_s
        self._tokens, self._at = float(burst), float("-inf")
        self.suppressed: Counter[NoticeKind] = Counter()
        """Number of messages suppressed since the last sent message, by kind."""

    def admit(self, kind: NoticeKind, now: float, urgent: bool = False) -> Counter[NoticeKind] | None:
        """Return None to suppress a message, else the counts of messages suppressed since the last sent one."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) / self._every_s)
        self._at = now
        if self._tokens < 1.0 and not urgent:
            self.suppressed[kind] += 1
            return None
        self._tokens = max(0.0, self._tokens - 1.0)
        suppressed, self.suppressed = self.suppressed, Counter()
        return suppressed


class Notifier:
    """Messages about a run's events and long waits, with one sender per address.

    Invariants:
    - No call waits for an address. The first failure of an address is logged, every failure is counted, and the next
      message is tried again. An address that misses a deadline gets no further messages; they are counted as unsent.
    - A stall is reported once per wait.
    """

    def __init__(
        self, urls: Sequence[str], run_name: str, table: NotifyTable, redactor: Redactor, clock: Clock, report: Report
    ) -> None:
        """`urls` are the resolved addresses of `table`; they are secrets and are never written or logged."""
        self._run_name, self._table, self._redactor, self._clock = run_name, table, redactor, clock
        self._limiter = NoticeLimiter(table.burst, table.every_s)
        self._senders = [
            UrlSender(f"notify.urls[{at}]", url, clock, report, table.timeout_s) for at, url in enumerate(urls)
        ]
        self._stalled: set[tuple[str, str, str, float]] = set()
        self._suppressed = 0

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of messages: `sent` and (still) `unsent`, summed over addresses, and `suppressed` by the limiter."""
        sent = sum(sender.sent for sender in self._senders)
        unsent = sum(sender.given for sender in self._senders) - sent
        return {"sent": sent, "unsent": unsent, "suppressed": self._suppressed}

    def event(self, event: Event) -> None:
        """Send a message about an event if `notify.events` contains its kind."""
        match event:
            case events.RunStarted(_, run_dir, config):
                self._tell("start", "started", f"{config.get('steps', '?')} steps, in {run_dir}", urgent=True)
            case events.GuardFired(action=action, folder=folder) if described := describe(event):
                does = "" if action == "warn" else f" ({action})"
                body = "\n".join([described[1], *self._sample(folder)])
                self._tell("divergence", f"{described[0]}{does}", body, urgent=action != "warn")
            case events.RoleFailed(role, error, exit_code, fatal) if not fatal:
                self._tell("recovery", f"{role} failed", self._quoted(error, exit_code))
            case events.RoleRecovered() | events.RolledBack() | events.RunRestarted() if described := describe(event):
                self._tell("recovery", *described)
            case events.RunFinished(status, summary):
                self._tell("end", status, self._summary(summary), urgent=True)

    def heartbeats(self, heartbeats: Sequence[Heartbeat], now: float) -> None:
        """Send messages about waits that last too long; `now` is on the clock of the waits."""
        for sender in self._senders:
            sender.check()
        stalled = {}
        if any(heartbeat.state == "paused" for heartbeat in heartbeats):
            heartbeats = ()  # a paused run waits for a person, and the message about the pause has been sent
        for wait in (wait for heartbeat in heartbeats for wait in heartbeat.waits):
            late = now - LATE_S > wait.deadline and not wait.polls
            if late or now - wait.since > self._table.stall_s:
                stalled[wait.role, wait.reason, wait.blocked_by, wait.since] = wait
        for key in stalled.keys() - self._stalled:
            wait = stalled[key]
            blocked = f", blocked by {wait.blocked_by}" if wait.blocked_by else ""
            body = f"{wait.role} has waited {now - wait.since:.0f} s for {wait.reason}{blocked}; see `relax why`"
            self._tell("stall", f"{wait.role} waits too long", body)
        self._stalled = set(stalled)

    def close(self) -> None:
        """Send the queued messages of each address within the deadline of one message."""
        for sender in self._senders:
            sender.close()

    def _tell(self, kind: NoticeKind, title: str, body: str, urgent: bool = False) -> None:
        if kind not in self._table.events:
            return
        left_out = self._limiter.admit(kind, self._clock.now(), urgent)
        if left_out is None:
            self._suppressed += 1
            return
        if left_out:
            kinds = ", ".join(f"{count} of {name}" for name, count in sorted(left_out.items()))
            body = f"{_cut(body, LONGEST - 200)}\nLeft out since the last message: {kinds}."
        for sender in self._senders:
            sender.give(self._clean(f"{self._run_name}: {title}"), self._clean(body))

    def _clean(self, text: str) -> str:
        """Redact secrets and escape control characters, then cut: cutting first could leave part of a secret."""
        return _cut(printable(self._redactor.text(text)), LONGEST)

    def _quoted(self, error: str, exit_code: int) -> str:
        """Return an error's text. Hide a plugin's error, which may quote samples, unless `notify.samples` is set."""
        if exit_code != PluginError.exit_code or self._table.samples:
            return error
        return f"an error of {error.partition(':')[0]}; its text is in the run's events.jsonl"

    def _sample(self, folder: str) -> list[str]:
        """Return the first sample in a guard's folder as a line, if `notify.samples` is set."""
        if not self._table.samples or not folder:
            return []
        found = read_frames(Path(folder) / "samples.jsonl.zst")
        return [_cut(f"A sample: {sample.get('response')}", LONGEST_SAMPLE) for sample in found][:1]

    def _summary(self, summary: Mapping[str, Any]) -> str:
        """Describe a finished run in one line."""
        parts = [f"{summary.get('steps', 0)} steps", f"{float(summary.get('wall_seconds') or 0):.0f} s"]
        first, last = summary.get("reward_first"), summary.get("reward_last")
        if first is not None and last is not None:
            parts.append(f"reward {first:.3f} to {last:.3f}")
        if error := summary.get("error"):
            parts.append(self._quoted(str(error), int(summary.get("exit_code", 1))))
        return ", ".join(parts)


class UrlSender:
    """A sender of messages to one address, in order and in a thread of its own."""

    def __init__(self, name: str, url: str, clock: Clock, report: Report, timeout_s: float) -> None:
        self._name, self._url, self.given, self.sent, self._failed = name, url, 0, 0, False
        self._worker = CallbackWorker(name, clock, report, timeout_s)

    def give(self, title: str, body: str) -> None:
        """Queue a message; it is discarded if the address was given up."""
        self.given += 1
        self._worker.give(partial(self._send, title, body))

    def check(self) -> None:
        """Give up the address if a message is past its deadline."""
        self._worker.check()

    def close(self) -> None:
        self._worker.close()

    def _send(self, title: str, body: str) -> None:
        """Send one message. The first failure is raised and reported by the worker; later ones are only counted."""
        target, problem = _target(self._url), "is not understood"
        if target is not None:
            problem = "" if target.notify(title=title, body=body) else "did not take a message"
        if not problem:
            self.sent += 1
            return
        if not self._failed:
            self._failed = True
            raise InfrastructureError(f"{self._name} {problem}; further failures are only counted")


def _target(url: str) -> Any:
    """Return the Apprise object for an address, or None if Apprise does not understand the address."""
    import apprise

    # Apprise logs URLs, which are secrets here. Callers report failures without them.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    target = apprise.Apprise()
    return target if target.add(url) else None


def is_understood(url: str) -> bool:
    """Return True if Apprise understands an address; nothing is sent."""
    return _target(url) is not None


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
