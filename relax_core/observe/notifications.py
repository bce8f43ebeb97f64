# SPDX-License-Identifier: Apache-2.0
"""Messages to people through Apprise: a run starts, stalls, diverges, recovers or ends.

The recorder hands over what happens and goes on at once; each address is sent to in a thread of its own, within a deadline.
No message holds a secret, a control character or, unless `notify.samples` asks for them, a text of a sample.
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
from relax_core.observe.documents import read_frames
from relax_core.observe.logging import Redactor
from relax_core.observe.observers import CallbackWorker, Report

LONGEST = 1_500
"""Characters of a message: what most services take in one."""
LONGEST_SAMPLE = 600
LATE_S = 30.0
"""Past its deadline until a wait is told: a heartbeat that says that it ended may be late by seconds."""
IN_LOG = "what it said is in the run's log"


class NoticeLimiter:
    """A token bucket: how many messages go out, and the count of those that did not.

    Invariants:
    - At most `burst` go out at once, and over any time one more for each `every_s` of it; urgent ones go out in any case.
    - Each message that did not go out is counted in exactly one that did, the next.
    """

    def __init__(self, burst: int, every_s: float) -> None:
        self._burst, self._every_s = burst, every_s
        self._tokens, self._at = float(burst), float("-inf")
        self.suppressed: Counter[NoticeKind] = Counter()
        """By kind, since the last that went out."""

    def admit(self, kind: NoticeKind, now: float, urgent: bool = False) -> Counter[NoticeKind] | None:
        """Return what was left out since the last message where this one may go out; None where it is left out too."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) / self._every_s)
        self._at = now
        if self._tokens < 1.0 and not urgent:
            self.suppressed[kind] += 1
            return None
        self._tokens = max(0.0, self._tokens - 1.0)
        told, self.suppressed = self.suppressed, Counter()
        return told


class Notifier:
    """Makes messages of what happens in a run, and hands them to a sender for each address.

    Invariants:
    - No call waits for an address. One that fails is logged the first time and counted each time, and tried again with the
      next message; one that is late for its deadline gets no further message, and those are counted too.
    - A stall is told once for each wait.
    """

    def __init__(
        self, urls: Sequence[str], run_name: str, table: NotifyTable, redactor: Redactor, clock: Clock, report: Report
    ) -> None:
        """`urls`: those of `table`, read. They are secrets, and appear in nothing that is written."""
        self._run_name, self._table, self._redactor, self._clock = run_name, table, redactor, clock
        self._limiter = NoticeLimiter(table.burst, table.every_s)
        self._senders = [
            UrlSender(f"notify.urls[{at}]", url, clock, report, table.timeout_s) for at, url in enumerate(urls)
        ]
        self._stalled: set[tuple[str, str, str, float]] = set()
        self._suppressed = 0

    @property
    def counts(self) -> dict[str, int]:
        """Count messages: those that an address took, those that one did not take (yet), and those that were left out."""
        sent = sum(sender.sent for sender in self._senders)
        unsent = sum(sender.given for sender in self._senders) - sent
        return {"sent": sent, "unsent": unsent, "suppressed": self._suppressed}

    def event(self, event: Event) -> None:
        """Tell people of an event, where it is one to tell."""
        match event:
            case events.RunStarted(_, run_dir, config):
                self._tell("start", "started", f"{config.get('steps', '?')} steps, in {run_dir}", urgent=True)
            case events.GuardFired(step, guard, action, reason, evidence):
                does = "" if action == "warn" else f" ({action})"
                body = "\n".join([f"{reason}{HINTS.get(action, '')}", *self._sample(evidence)])
                self._tell("divergence", f"guard {guard} fired at step {step}{does}", body, urgent=action != "warn")
            case events.RoleFailed(role, error, exit_code, fatal) if not fatal:
                self._tell("recovery", f"{role} is being replaced", self._quoted(error, exit_code))
            case events.RoleRecovered(role, seconds, detail):
                self._tell("recovery", f"{role} works again", f"after {seconds:.1f} s{': ' * bool(detail)}{detail}")
            case events.RolledBack(version, reason):
                self._tell("recovery", f"rolled back to step {version.step}", reason)
            case events.RunRestarted(step, reason, in_a_row, limit):
                body = f"restart {in_a_row} of {limit} in a row, after: {reason}"
                self._tell("recovery", f"restarted after step {step}", body)
            case events.RunFinished(status, summary):
                self._tell("end", status, self._summary(summary), urgent=True)

    def heartbeats(self, heartbeats: Sequence[Heartbeat], now: float) -> None:
        """Tell people of waits that last too long; `now` is on the clock of the waits."""
        for sender in self._senders:
            sender.check()
        stalled = {}
        if any(heartbeat.state == "paused" for heartbeat in heartbeats):
            heartbeats = ()  # everybody waits for a person, who was told
        for wait in (wait for heartbeat in heartbeats for wait in heartbeat.waits):
            late = now - LATE_S > wait.deadline and not wait.polls
            if late or now - wait.since > self._table.stall_s:
                stalled[wait.owner, wait.reason, wait.owed_by, wait.since] = wait
        for key in stalled.keys() - self._stalled:
            wait = stalled[key]
            owed = f", owed by {wait.owed_by}" if wait.owed_by else ""
            body = f"{wait.owner} has waited {now - wait.since:.0f} s for {wait.reason}{owed}; `relax why` follows the waits"
            self._tell("stall", f"{wait.owner} waits too long", body)
        self._stalled = set(stalled)

    def close(self) -> None:
        """Send what is queued, within the deadline of a message."""
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
        """Leave secrets out, and control characters visible; cut it last, so that no part of a secret is left."""
        return _cut(printable(self._redactor.text(text)), LONGEST)

    def _quoted(self, error: str, exit_code: int) -> str:
        """Quote an error; that of a plugin may hold texts of samples."""
        if exit_code != PluginError.exit_code or self._table.samples:
            return error
        return f"an error of {error.partition(':')[0]}; {IN_LOG}"

    def _sample(self, evidence: Mapping[str, Any]) -> list[str]:
        """Quote the first sample of the step, where that is asked for."""
        folder = evidence.get("folder")
        if not self._table.samples or not folder:
            return []
        found = read_frames(Path(str(folder)) / "samples.jsonl.zst")
        return [_cut(f"A sample: {sample.get('response')}", LONGEST_SAMPLE) for sample in found][:1]

    def _summary(self, summary: Mapping[str, Any]) -> str:
        """Describe a run in one line."""
        parts = [f"{summary.get('steps', 0)} steps", f"{float(summary.get('wall_seconds') or 0):.0f} s"]
        first, last = summary.get("reward_first"), summary.get("reward_last")
        if first is not None and last is not None:
            parts.append(f"reward {first:.3f} to {last:.3f}")
        if error := summary.get("error"):
            parts.append(self._quoted(str(error), int(summary.get("exit_code", 1))))
        return ", ".join(parts)


HINTS = {
    "pause": "; the run is paused until `relax continue`, and `relax why` says more",
    "roll-back": "; the run goes back to its last checkpoint",
    "stop": "; the run is stopped",
}


class UrlSender:
    """Sends messages to one address in order, in a thread of its own."""

    def __init__(self, name: str, url: str, clock: Clock, report: Report, timeout_s: float) -> None:
        self._name, self._url, self.given, self.sent, self._failed = name, url, 0, 0, False
        self._worker = CallbackWorker(name, clock, report, timeout_s)

    def give(self, title: str, body: str) -> None:
        """Queue a message; an address that is given up takes none."""
        self.given += 1
        self._worker.give(partial(self._send, title, body))

    def check(self) -> None:
        """Give the address up when a message is late for its deadline."""
        self._worker.check()

    def close(self) -> None:
        self._worker.close()

    def _send(self, title: str, body: str) -> None:
        """Send it. Only the first failure is raised, which the worker reports; the others are counted."""
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
    """Return Apprise's receiver of messages for an address; None where it does not understand that."""
    import apprise

    # Its own log quotes URLs, which are secrets here; what failed its callers say, without them.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    target = apprise.Apprise()
    return target if target.add(url) else None


def is_understood(url: str) -> bool:
    """Tell whether Apprise understands an address; nothing is sent."""
    return _target(url) is not None


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
