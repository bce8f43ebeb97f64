# SPDX-License-Identifier: Apache-2.0
"""The live display of a run on stderr: progress, reward, evaluation, lag, throughput, and what each role does.

Events only update numbers; a thread of rich draws them at most four times a second. Without a terminal the display
prints one plain line per step; with `mode="quiet"` (`--json`) it prints nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_core.api import events
from relax_core.api.checks import MISMATCH, CheckFinding
from relax_core.api.errors import printable
from relax_core.api.events import Event, describe
from relax_core.api.role import Clock, Heartbeat, SystemClock
from relax_core.observe.first_step import fault_lines, passed_line
from relax_core.views.why import chain, seconds

Mode = Literal["auto", "live", "plain", "quiet"]
HERTZ = 4
WIDTH = 40
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"busy": "green", "waiting": "yellow", "failed": "bold red", "paused": "magenta"}


class LiveDisplay:
    """A display that is fed by `event` and `heartbeats`; `close` leaves the last picture on the screen."""

    def __init__(
        self,
        name: str,
        steps: int | None,
        *,
        mode: Mode = "auto",
        console: Console | None = None,
        clock: Clock | None = None,
        first_step: int = 0,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._mode = mode if mode != "auto" else ("live" if self._console.is_terminal else "plain")
        self._clock = clock or SystemClock()
        self._name, self._steps, self._first = printable(name), steps, first_step
        self._started = self._clock.now()
        self._first_done: float | None = None
        self._step = first_step
        self._metrics: Mapping[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=WIDTH)
        self._evals: dict[str, float] = {}
        self._beats: tuple[Heartbeat, ...] = ()
        self._note = ""
        self._bubble: float | None = None
        self._lock = threading.Lock()
        self._live: Live | None = None
        if self._mode == "live":
            self._live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=HERTZ)
            self._live.start()

    def event(self, event: Event) -> None:
        with self._lock:
            line = printable(self._take(event))
        if line and self._mode == "plain":
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def heartbeats(self, beats: Sequence[Heartbeat]) -> None:
        with self._lock:
            self._beats = tuple(sorted(beats, key=lambda beat: beat.role))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _take(self, event: Event) -> str:
        """Update the numbers; return the line that plain mode prints, empty for none."""
        match event:
            case events.RunStarted():
                return f"{self._name}: {event.run_dir}, ready after {self._clock.now() - self._started:.1f} s"
            case events.StepFinished(step, metrics):
                self._step, self._metrics = step, metrics
                if self._first_done is None:
                    self._first_done, self._first = self._clock.now(), step
                if "reward/mean" in metrics:
                    self._rewards.append(metrics["reward/mean"])
                of = f"/{self._steps}" if self._steps else ""
                return "  ".join([f"step {step}{of}", *self._numbers()])
            case events.FirstStepChecked(step, made):
                checks = [CheckFinding(**check) for check in made]  # type: ignore[arg-type]
                faults = fault_lines(checks, step)
                self._note = next(iter(faults), self._note)
                return "\n".join(filter(None, (passed_line(checks, step), *faults)))
            case events.StepMeasured(_, metrics):
                self._bubble = metrics.get("time/bubble_fraction", self._bubble)
                return ""
            case events.EvalFinished(step, set_name, mean, count, temperature):
                self._evals[set_name] = mean
                how = f"temperature {temperature:g}" if event.measure == "mean" else event.measure
                return f"eval {set_name} at step {step}: {mean:.3f} (n={count}, {how})"
            case events.Logged(_, role, message):
                return f"{role}: {message}"
            case events.RunFinished(status):
                return f"{self._name}: {status} after step {self._step}"
        if described := describe(event):
            self._note = ": ".join(described)
            self._step = event.step if isinstance(event, events.RolledBack | events.RunRestarted) else self._step
            return self._note
        return ""

    def _numbers(self) -> list[str]:
        lag = _number(self._metrics, "lag/mean", ".2f")
        if lag:
            lag += f" (max {self._metrics.get('lag/max', self._metrics['lag/mean']):.0f})"
        shown = {
            "reward": _number(self._metrics, "reward/mean", ".3f"),
            "loss": "" if "reward/mean" in self._metrics else _number(self._metrics, "train/loss", ".4f"),
            "accuracy": _number(self._metrics, "pairs/accuracy", ".2f"),
            **{f"eval/{name}": f"{mean:.3f}" for name, mean in self._evals.items()},
            "lag": lag,
            "mismatch": _number(self._metrics, MISMATCH, ".1e"),
            "samples/s": _number(self._metrics, "samples/per_s", ".1f"),
            "tokens/s": _number(self._metrics, "tokens/per_s", ",.0f"),
            "s/step": _number(self._metrics, "time/step_s", ".2f"),
            "bubble": "" if self._bubble is None else f"{self._bubble:.0%}",
        }
        return [f"{key} {value}" for key, value in shown.items() if value]

    def _picture(self) -> Group:
        """Return the picture for rich, made from a copy of the numbers."""
        with self._lock:
            rewards, beats, note = list(self._rewards), self._beats, self._note
            numbers = self._numbers()
            if rewards and "reward/mean" in self._metrics:  # drop the reward, the first number: its curve shows it
                numbers = numbers[1:]
            rows: list[Table | Text] = [self._progress(), Text(printable("   ".join(numbers)))]
        if rewards:
            rows.insert(1, Text.assemble("reward ", (sparkline(rewards), "cyan"), f" {rewards[-1]:.3f}"))
        if beats:
            roles, now = Table.grid(padding=(0, 2)), self._clock.now()
            for beat in beats:
                detail = Text(printable(doing(beat, now)), overflow="ellipsis", no_wrap=True)
                roles.add_row(Text(printable(beat.role)), Text(beat.state, style=_STYLES.get(beat.state, "")), detail)
            rows.append(roles)
            rows.append(Text(printable(_wait_chain(beats, now)), overflow="ellipsis", no_wrap=True))
        if note:
            rows.append(Text(printable(note), style="yellow", overflow="ellipsis", no_wrap=True))
        return Group(*rows)

    def _progress(self) -> Table:
        line = Table.grid(padding=(0, 1))
        of = f"/{self._steps}" if self._steps else ""
        done, left = self._step - self._first, 0.0
        if self._steps and self._first_done is not None and done > 0:
            left = (self._clock.now() - self._first_done) / done * max(self._steps - self._step, 0)
        bar = ProgressBar(total=self._steps, completed=self._step, width=WIDTH) if self._steps else Text("")
        elapsed = seconds(self._clock.now() - self._started)
        eta = f"eta {seconds(left)}" if left else ""
        line.add_row(Text(self._name, style="bold"), bar, f"step {self._step}{of}", elapsed, eta)
        return line


def sparkline(values: Sequence[float]) -> str:
    """Return numbers as a line of bars, scaled from the lowest to the highest."""
    low, high = min(values), max(values)
    width = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / width * (len(_BARS) - 1))] for value in values)


def _wait_chain(beats: Sequence[Heartbeat], now: float) -> str:
    """Return the chain of waits as one line; empty if the chain has fewer than two links."""
    links = chain([asdict(beat) for beat in beats], now)
    if len(links) < 2:
        return ""
    age = links[-1].for_s
    newest = f" {links[-1].says}" + (f", {seconds(age)}" if age is not None else "")
    return "waits: " + " ← ".join(link.who for link in links) + newest


def doing(beat: Heartbeat, now: float) -> str:
    """Return a role's activity, or its longest wait with the wait's age."""
    if not beat.waits:
        return beat.doing
    wait = min(beat.waits, key=lambda wait: wait.since)
    blocker = f" from {wait.blocked_by}" if wait.blocked_by else ""
    waits = "for" if beat.state == "waiting" else "waits for"  # one loop of the role waits while another works
    return f"{waits} {wait.reason}{blocker}, {seconds(now - wait.since)}"


def _number(metrics: Mapping[str, float], key: str, form: str) -> str:
    return format(metrics[key], form) if key in metrics else ""
