# SPDX-License-Identifier: Apache-2.0
"""Feeds inputs to a target in a process of its own, judges how each ends, and makes what fails smaller.

An input is named by its target and its number, from which it is made again: `python -m tests.fuzz configuration:17`. The
process has a bound of memory and of time for each input, a home and a folder for temporary files of its own, and may write
nowhere else; it is a fork, so that imports are paid once.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from relax_core.api.errors import printable
from relax_core.runners.local.landlock import give_up_writing
from tests.fuzz.configuration_inputs import SECRET, Files
from tests.fuzz.targets import TARGETS, Target

CPU_S = 30
"""Seconds of CPU time for one input; the slowest valid ones take a thirtieth of it."""
WAIT_S = 300.0
"""Seconds until an input that waits and does nothing counts as stalled. Not less: a busy machine must not fail an input."""
MEMORY_BYTES = 1 << 30
"""Beyond what the process has when it begins."""
LONGEST = 4000
"""Characters of an error, several problems of one configuration together."""
SMALLER_TRIES = 60


@dataclass(frozen=True)
class Fault:
    """An input that ended in another way than it may."""

    name: str
    """`target:number`."""
    said: str
    files: Files

    def save(self, folder: Path) -> Path:
        """Write its files, and what went wrong, below a folder."""
        own = folder / self.name.replace(":", "-")
        write_files(own, self.files)
        (own / "FAULT.txt").write_text(self.said, errors="backslashreplace")
        return own


def make_input(target: str, number: int) -> Files:
    return TARGETS[target].make(Random(f"{target} {number}"))


def write_files(folder: Path, files: Files) -> None:
    for name, body in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def judge(target: Target, files: Files, folder: Path) -> str:
    """Feed one input; say what is wrong with how it ended, empty where nothing is."""
    write_files(folder, files)
    try:
        target.feed(folder)
    except target.refusals as error:
        return refusal_fault(error)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "tests/fuzz" not in frame.filename]
        last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
        own = [frame for frame in frames if "relax" in frame.filename]
        place = " <- ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-4:]))
        return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno} ({place}): {str(error)[:300]!r}"
    return ""


def refusal_fault(error: Exception) -> str:
    """Say what is wrong with the text of a refusal: each problem is one short line without secrets and control characters."""
    for one in getattr(error, "errors", ()) or (error,):
        text = str(one)
        for wrong, why in (
            (not text.strip(), "says nothing"),
            (text != printable(text) or "\n" in text, "has control characters"),
            (len(text) > LONGEST, f"has {len(text)} characters"),
            (SECRET in text and text.startswith(("notify", "run.env", "run ")), "shows a secret"),
            ("Traceback" in text or "object at 0x" in text, "shows the inside of the program"),
        ):
            if wrong:
                return f"a refusal that {why}: {type(one).__name__}: {text[:300]!r}"
    return ""


def run_target(name: str, numbers: Iterable[int]) -> Iterator[Fault]:
    """Feed a target its inputs of these numbers; one that kills or stalls its process is a fault, and the others go on."""
    left = list(numbers)
    make_input(name, 0)  # what all inputs share is made once
    for module in TARGETS[name].heavy:
        importlib.import_module(module)
    while left:
        reading, writing = os.pipe()
        sys.stdout.flush()
        with _folder() as place:
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                _serve(name, left, writing, place)
            os.close(writing)
            with os.fdopen(reading, "rb") as told:
                said, why = _listen(told, pid)
        done = [line.partition(" ") for line in said]
        for number, _, fault in done:
            if fault:
                yield Fault(f"{name}:{number}", fault, make_input(name, int(number)))
        left = left[len(done) :]
        if left:
            yield Fault(f"{name}:{left[0]}", why, make_input(name, left[0]))
            left = left[1:]


def _listen(told: Iterable[bytes], pid: int) -> tuple[list[str], str]:
    """Collect a line for each input until the process ends, or is killed since one takes too long."""
    lines, rest = [], b""
    descriptor = told.fileno()  # type: ignore[attr-defined]
    why = ""
    while True:
        ready, _, _ = select.select([descriptor], [], [], WAIT_S)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            why = f"no end within {WAIT_S:.0f} s"
            break
        if not (part := os.read(descriptor, 1 << 16)):
            break
        rest += part
        *whole, rest = rest.split(b"\n")
        lines += [line.decode() for line in whole]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGXCPU:
        why = f"more than {CPU_S} s of CPU time"
    return lines, why or f"the process ended ({code})"


def _serve(name: str, numbers: list[int], writing: int, place: Path) -> None:
    """Feed inputs and say a line for each; never returns."""
    try:
        confine(place)
        for number in numbers:
            said = fed(name, make_input(name, number), place)
            line = f"{number} {said}".replace("\n", "\\n").encode("utf-8", errors="backslashreplace")
            os.write(writing, line + b"\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for one process, in memory where there is such; it goes with all that the process left."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="relax-fuzz-", dir=memory) as folder:
        yield Path(folder)


def confine(place: Path) -> None:
    """Bound this process for good: its memory, its temporary files, its home, and where it may write."""
    gc.disable()  # the collector of a fork would copy every page
    for own in ("home", "tmp", "here"):
        (place / own).mkdir()
    os.environ |= {"HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "RELAX_RUNS": str(place / "here")}
    tempfile.tempdir = None
    os.chdir(place / "here")
    give_up_writing([str(place), "/dev"])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)


def fed(name: str, files: Files, place: Path) -> str:
    """Judge one input, and whether it left anything outside its folder; one that takes too much CPU time ends the process."""
    used, (_, most) = time.process_time(), resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used) + CPU_S, most))
    said = judge(TARGETS[name], files, place / "input")
    shutil.rmtree(place / "input", ignore_errors=True)
    for own in ("home", "tmp", "here"):
        for left in (path for path in (place / own).iterdir() if not path.name.startswith("torchinductor")):
            said = said or f"left {own}/{left.name} behind"
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    gc.collect(0)
    return said


def made_smaller(fault: Fault) -> Fault:
    """Take away what the fault does not need: files, and then pieces of each."""
    name = fault.name.partition(":")[0]
    kind = fault.said.partition(":")[0]

    def same(files: Files) -> bool:
        reading, writing = os.pipe()
        with _folder() as place:
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                confine(place)
                os.write(writing, fed(name, files, place).encode("utf-8", errors="backslashreplace"))
                os._exit(0)
            os.close(writing)
            ready, _, _ = select.select([reading], [], [], WAIT_S)
            said = os.read(reading, 1 << 16).decode() if ready else ""
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reading)
        return said.partition(":")[0] == kind

    files, tries = dict(fault.files), SMALLER_TRIES
    for one in sorted(files)[:SMALLER_TRIES]:
        without = {path: body for path, body in files.items() if path != one}
        if without and same(without):
            files = without
    for one in sorted(files):
        size = len(files[one]) // 2
        while size and tries > 0:
            for at in range(0, len(files[one]), size):
                tries -= 1
                shorter = {**files, one: files[one][:at] + files[one][at + size :]}
                if tries < 0 or same(shorter):
                    files = files if tries < 0 else shorter
                    break
            else:
                size //= 2
    return Fault(fault.name, fault.said, files)
