# SPDX-License-Identifier: Apache-2.0
"""Messages to people through Apprise when a run starts, stalls, diverges, recovers or ends.

Each address has a thread of its own and a deadline per message. Messages contain no secrets and no control characters,
and texts of samples only if `notify.samples` is set.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.api import events
from relax_core.api.checks import CheckFinding, PreflightFacts
from relax_core.api.errors import PluginError, printable
from relax_core.api.events import Event, describe
from relax_core.api.role import Heartbeat
from relax_plugin_notify.table import NoticeKind, NotifyTable

LOG = logging.getLogger(__name__)
LONGEST = 1_500
"""Largest number of characters in a message; most services accept this length."""
LONGEST_SAMPLE = 600
LARGEST_READ = 1 << 20
"""Bytes of a guard's samples that are read to find the first sample."""
LONGEST_CLOSE_S = 25.0
"""Most seconds to send the last messages; a run waits a little longer for its observers."""
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
        self,
        urls: Sequence[str],
        run_name: str,
        table: NotifyTable,
        redact: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`urls` are the resolved addresses of `table`; they are secrets and are never written or logged."""
        self._run_name, self._table, self._redact, self._clock = run_name, table, redact, clock
        self._limiter = NoticeLimiter(table.burst, table.every_s)
        self._senders = [
            UrlSender(f"notify.urls[{number}]", url, table.timeout_s, clock) for number, url in enumerate(urls)
        ]
        self._stalled: set[tuple[str, str, str, float]] = set()
        self._suppressed = 0

    @classmethod
    def of(cls, opened: events.RunOpened) -> Notifier:
        """Make the notifier of a run. Raises ConfigError for a secret that cannot be read."""
        table = opened.table("notify", NotifyTable)
        return cls([url.reveal() for url in table.urls], opened.name, table, opened.redact)

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
        """Send the queued messages of each address within the deadline of one message, and log the numbers of messages."""
        for sender in self._senders:
            sender.end()
        until = time.monotonic() + min(self._table.timeout_s, LONGEST_CLOSE_S)
        for sender in self._senders:
            sender.join(max(0.0, until - time.monotonic()))
            sender.check()
        LOG.info("notifications: %(sent)d sent, %(unsent)d unsent, %(suppressed)d suppressed", self.counts)

    def _tell(self, kind: NoticeKind, title: str, body: str, urgent: bool = False) -> None:
        if kind not in self._table.events:
            return
        left_out = self._limiter.admit(kind, self._clock(), urgent)
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
        return _cut(printable(self._redact(text)), LONGEST)

    def _quoted(self, error: str, exit_code: int) -> str:
        """Return an error's text. Hide a plugin's error, which may quote samples, unless `notify.samples` is set."""
        if exit_code != PluginError.exit_code or self._table.samples:
            return error
        return f"an error of {error.partition(':')[0]}; its text is in the run's events.jsonl"

    def _sample(self, folder: str) -> list[str]:
        """Return the first sample in a guard's folder as a line, if `notify.samples` is set."""
        if not self._table.samples or not folder:
            return []
        import zstandard

        try:
            with (Path(folder) / "samples.jsonl.zst").open("rb") as file:
                reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
                first = json.loads(reader.read(LARGEST_READ).partition(b"\n")[0])
        except (OSError, ValueError, zstandard.ZstdError):
            return []
        return [_cut(f"A sample: {first.get('response')}", LONGEST_SAMPLE)]

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
    """A sender of messages to one address, in order and in a thread of its own.

    Life cycle: `on -> given up`, at a message past its deadline. The thread of a hanging message is abandoned.
    """

    def __init__(self, name: str, url: str, timeout_s: float, clock: Callable[[], float]) -> None:
        self._name, self._url, self._timeout_s, self._clock = name, url, timeout_s, clock
        self.given, self.sent, self._failed, self._on = 0, 0, False, True
        self._since: float | None = None
        self._messages: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def give(self, title: str, body: str) -> None:
        """Queue a message; it is discarded if the address was given up."""
        self.given += 1
        self._messages.put((title, body))

    def check(self) -> None:
        """Give up the address if a message is past its deadline."""
        since = self._since
        if self._on and since is not None and self._clock() - since > self._timeout_s:
            self._on = False
            LOG.warning(f"{self._name} is off: one message took longer than {self._timeout_s:g} s")

    def end(self) -> None:
        """Let the thread end after the queued messages."""
        self._messages.put(None)

    def join(self, wait_s: float) -> None:
        self._thread.join(wait_s)

    def _work(self) -> None:
        while self._on and (message := self._messages.get()) is not None:
            self._since = self._clock()
            problem = self._send(*message)
            self._since = None
            self.sent += not problem
            if problem and not self._failed:
                self._failed = True
                LOG.warning(f"{self._name} {problem}; further failures are only counted")

    def _send(self, title: str, body: str) -> str:
        """Send one message; return the problem, without the address, or an empty text."""
        try:
            target = _target(self._url)
            if target is None:
                return "is not understood"
            return "" if target.notify(title=title, body=body) else "did not take a message"
        except Exception as error:  # its text may contain the address
            return f"raised {type(error).__name__}"


def addresses(facts: PreflightFacts) -> Iterator[CheckFinding]:
    """Check that Apprise understands each address of `notify.urls`; send nothing."""
    table = NotifyTable.model_validate(facts.config.get("notify", {}))
    name, advice = "Apprise understands the address", "write the address as Apprise's documentation shows"
    for number, url in enumerate(table.urls):
        state = "ok" if _target(url.reveal()) is not None else "failed"
        found = url.reference if state == "ok" else f"{url.reference}, whose address Apprise does not understand"
        yield CheckFinding(name, state, found, advice=advice, field=f"notify.urls.{number}")


def _target(url: str) -> Any:
    """Return the Apprise object for an address, or None if Apprise does not understand the address."""
    import apprise

    # Apprise logs URLs, which are secrets here. Callers report failures without them.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    target = apprise.Apprise()
    return target if target.add(url) else None


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
