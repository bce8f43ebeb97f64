# SPDX-License-Identifier: Apache-2.0
"""What a run costs while it goes: processor seconds and memory of a process and all that it started."""

from __future__ import annotations

import bisect
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

EVERY_S = 0.25
MEMORY_EVERY = 4
"""Looks between two looks at memory, which take longer."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Since the machine's start for it, since their own start for the processes."""

    at: float
    own_s: float
    machine_s: float


class Watched:
    """A command and its descendants, looked at several times a second until it ends."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], limit_s: float) -> None:
        self._command, self._environ, self._limit_s = command, environ, limit_s
        self._moments: list[Moment] = []
        self._seen: dict[int, float] = {}
        self.peak_bytes = 0
        """Most memory at any look; a page that processes share counts once."""

    def run(self) -> str:
        """Its stdout; RuntimeError where it fails or takes too long."""
        process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environ
        )
        watching = threading.Thread(target=self._watch, args=(psutil.Process(process.pid),), daemon=True)
        watching.start()
        try:
            out, err = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            raise RuntimeError(f"{self._command[0]} took more than {self._limit_s:.0f} s") from None
        watching.join()
        if process.returncode:
            raise RuntimeError(f"{self._command[0]} ended with {process.returncode}: {err.strip()[-2000:]}")
        return out

    @property
    def span(self) -> tuple[float, float]:
        """When it was first and last looked at."""
        return self._moments[0].at, self._moments[-1].at

    def between(self, start: float, end: float) -> tuple[float, float]:
        """Processor seconds of the command, and of everything else on the machine, between two times of `time.time()`."""
        first, last = self._near(start), self._near(end)
        own = last.own_s - first.own_s
        return own, max(0.0, last.machine_s - first.machine_s - own)

    def _near(self, at: float) -> Moment:
        if not self._moments:
            raise RuntimeError("the command ended before it was looked at")
        place = bisect.bisect_left([moment.at for moment in self._moments], at)
        return self._moments[min(place, len(self._moments) - 1)]

    def _watch(self, root: psutil.Process) -> None:
        while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
            try:
                family = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for one in family:
                try:
                    times = one.cpu_times()
                except psutil.Error:
                    continue
                self._seen[one.pid] = max(self._seen.get(one.pid, 0.0), times.user + times.system)
            if len(self._moments) % MEMORY_EVERY == 0:
                self.peak_bytes = max(self.peak_bytes, sum(_resident_bytes(one.pid) for one in family))
            self._moments.append(Moment(time.time(), sum(self._seen.values()), _machine_s()))
            time.sleep(EVERY_S)


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process, with its share of pages that others map too; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _machine_s() -> float:
    """Busy processor seconds of all cores, as Linux counts them."""
    fields = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, _ = fields
    return (user + nice + system + irq + soft) / 100.0
