# SPDX-License-Identifier: Apache-2.0
"""The error types of Relax. A type implies the caller's reaction, and sets the exit code of the `relax` command.

Plugin authors raise plain Python errors; the core wraps them in `PluginError` with the component's name.
Every message is one sentence that names the field or component, the received value, and the fix.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""`errno` values of a full disk, an exhausted quota, and a file over the size limit."""
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that change the text direction, and lone surrogates."""
_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
LONGEST = 1500
"""Largest number of characters of one part of a message. Longer parts, such as a file's content, are cut."""


def printable(text: str) -> str:
    """Escape control characters as JSON does, so that untrusted text can't control the terminal."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Return the text as one printable line; replace the middle of a text longer than LONGEST characters."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... ({len(text)} characters) ... {text[-LONGEST // 4 :]}"
    return printable(" ".join(text.splitlines()) if "\n" in text else text)


class RelaxError(Exception):
    """Any error of Relax. An error of exactly this type is a fault in Relax itself; the run stops."""

    exit_code = 1


class ConfigError(RelaxError):
    """A wrong key, value, file or combination in the configuration; the user must fix the configuration."""

    exit_code = 2

    def __init__(self, field: str, got: object, fix: str) -> None:
        super().__init__(f"{one_line(field)}: got {one_line(str(got))}; {one_line(fix)}")
        self.field, self.got, self.fix = field, got, fix


class PluginError(RelaxError):
    """A failure in the code of the named plugin or component; its author must fix the code.

    The text names the file and the line of the innermost of `frames`, a traceback as Python prints it.
    """

    exit_code = 3

    def __init__(self, component: str, message: str, frames: str = "") -> None:
        for path, line in _FRAME.findall(frames)[-1:]:
            if f"{os.path.basename(path)}:{line}" not in message:
                message += f" ({path}:{line})"
        super().__init__(f"{component}: {message}")
        self.component, self.frames = component, frames


class InfrastructureError(RelaxError):
    """A failure of a process, port, disk or machine; retry on another process or machine, or resume the run."""

    exit_code = 4

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class LastingFailure(InfrastructureError):
    """A failure that a restart would only repeat. The run ends at once and is not restarted; a person must act."""


class DiskFull(LastingFailure):
    """A full disk. Earlier files are intact. Free space and resume; a retry without free space fails again."""


def disk_error(path: str | Path, error: OSError, what: str = "", then: str = "") -> InfrastructureError:
    """Return the error to raise for a failed access to a path: for a full disk, DiskFull with the free space.

    `what` goes before the path in the message; `then` says how to continue once the cause is fixed.
    """
    place, why = f"{what}{': ' * bool(what)}{path}", error.strerror or str(error)
    then = then or continuing(path) or "run the command again"
    if error.errno not in NO_ROOM:
        return InfrastructureError(f"{place}: {why}; fix the cause, then {then}")
    return DiskFull(f"{place}: no space left to write ({why}{_free_there(Path(path))}); free some, then {then}")


def continuing(path: str | Path) -> str:
    """Say how to continue the run to which a path belongs; "" if it belongs to none.

    `relax resume` needs a checkpoint, or a run with stages.
    """
    path = Path(path).absolute()
    for run in reversed((path, *path.parents)):  # the outermost folder, since stages look like runs
        with suppress(OSError):
            if not (run / "checkpoints").is_dir() or not (run / "config.toml").is_file():
                continue
            if (run / "stages").is_dir() or any(run.glob("checkpoints/step-*/state.json")):
                return f"`relax resume {run}`; everything written before is readable"
            return f"repeat the command with `--run-dir {run} --resume`, because the run has no checkpoint yet"
    return ""


def _free_there(path: Path) -> str:
    """Describe the free space on the disk of a path that need not exist; return "" if the space is unknown."""
    for folder in (path, *path.parents):
        try:
            return f", {shutil.disk_usage(folder).free / 1e6:.1f} MB free"
        except FileNotFoundError:
            continue
        except OSError:
            break
    return ""


class WorkerDied(InfrastructureError):
    """A worker process that ended or does not answer; the caller starts a new worker."""


class PoolFailed(InfrastructureError):
    """The failure of all engines of a pool, not caused by a sample; a restarted role may get new engines."""


class RetryLater(InfrastructureError):
    """A live weight transfer that ended before the receiver joined; the receiver requests the newest weights again."""


class SourceUnavailable(InfrastructureError, ValueError):
    """A network or disk failure while reading an image, video or audio; try again later: the content may be fine."""


class Diverged(RelaxError):
    """A run that a guard stopped because training diverged; its last checkpoint is older than the divergence."""

    exit_code = 5


class StaleFence(RelaxError):
    """The use of a row lease or a step number that has become invalid; nothing was written."""


class DeadlineExceeded(InfrastructureError):
    """A wait longer than its deadline; `waiter` waited `waited_s` seconds for `reason`."""

    def __init__(self, waiter: str, reason: str, waited_s: float, fix: str = "") -> None:
        advice = f"; {fix}" if fix else ""
        super().__init__(f"{waiter} waited {waited_s:.1f} s for {reason}{advice}; see `relax why`")
        self.waiter, self.reason, self.waited_s = waiter, reason, waited_s
