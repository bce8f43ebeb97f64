# SPDX-License-Identifier: Apache-2.0
"""Errors by boundary: each type says what its caller does, and carries the exit code of the command line.

Plugin authors raise plain Python errors; the core attributes them once (`PluginError`).
Every message is one sentence that names the field or boundary, what was received, and what to do.
"""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of an OSError for which a disk, a quota or a file has no room."""
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, those that turn the direction of a line, and halves of characters."""
LONGEST = 1500
"""Characters of one part of a message that are shown; what was received may be a file's whole content."""


def printable(text: str) -> str:
    """The text with control characters as `\\u001b`: what a model, a task or a child wrote can't steer a terminal. A JSON
    document means the same afterwards."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """The text as one printable line, its middle left out where it is very long."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... ({len(text)} characters) ... {text[-LONGEST // 4 :]}"
    return printable(" ".join(text.splitlines()) if "\n" in text else text)


class RelaxError(Exception):
    """Stop the run: something failed that is nobody's configuration, plugin or machine."""

    exit_code = 1


class ConfigError(RelaxError):
    """Fix the configuration: a key, a value, a file or a combination is wrong."""

    exit_code = 2

    def __init__(self, field: str, got: object, fix: str) -> None:
        super().__init__(f"{one_line(field)}: got {one_line(str(got))}; {one_line(fix)}")
        self.field, self.got, self.fix = field, got, fix


class PluginError(RelaxError):
    """Fix the plugin: code of the named distribution or component failed."""

    exit_code = 3

    def __init__(self, component: str, message: str, frames: str = "") -> None:
        super().__init__(f"{component}: {message}")
        self.component, self.frames = component, frames


class InfrastructureError(RelaxError):
    """Retry elsewhere or resume: a process, port, disk or machine failed."""

    exit_code = 4

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class DiskFull(InfrastructureError):
    """Free space, then resume: what was written before is whole, and a retry would only fill the disk again."""


def disk_error(path: str | Path, error: OSError, what: str = "", then: str = "") -> InfrastructureError:
    """Make the error of a path that the disk refused, with what is free on a full one.

    `what` precedes the path; `then` is what to do once the cause is gone.
    """
    place, why = f"{what}{': ' * bool(what)}{path}", error.strerror or str(error)
    if error.errno not in NO_ROOM:
        then = then or "run the command again, or `relax resume` a run that had begun"
        return InfrastructureError(f"{place}: {why}; mend that, then {then}")
    then = then or "continue with `relax resume`; everything written before is readable"
    return DiskFull(f"{place}: no space left to write ({why}{_free_there(Path(path))}); free some, then {then}")


def _free_there(path: Path) -> str:
    """Say what is free on the disk of a path, which need not exist; nothing where that can't be told."""
    for folder in (path, *path.parents):
        try:
            return f", {shutil.disk_usage(folder).free / 1e6:.1f} MB free"
        except FileNotFoundError:
            continue
        except OSError:
            break
    return ""


class WorkerDied(InfrastructureError):
    """Replace the worker: its process ended or stopped answering."""


class PoolFailed(InfrastructureError):
    """Fail with a pool of engines of which none can be had any more: no sample is to blame, and another start may have some."""


class RetryLater(InfrastructureError):
    """Ask for the newest weights once more: what was handed out is over, and nothing is wrong with the receiver."""


class SourceUnavailable(InfrastructureError, ValueError):
    """Read the source of a medium again later: its network or disk failed, which says nothing about its content."""


class Diverged(RelaxError):
    """Look at the evidence and change the configuration: a guard stopped the run, whose last checkpoint is from before it."""

    exit_code = 5


class StaleFence(RelaxError):
    """Forget the lease: another holder has it now; nothing was written."""


class DeadlineExceeded(InfrastructureError):
    """Decide what to do with the wait that ran out: it had this owner and this reason."""

    def __init__(self, owner: str, reason: str, waited_s: float, fix: str = "") -> None:
        advice = f"; {fix}" if fix else ""
        super().__init__(f"{owner} waited {waited_s:.1f} s for {reason}{advice}; see `relax why`")
        self.owner, self.reason, self.waited_s = owner, reason, waited_s
