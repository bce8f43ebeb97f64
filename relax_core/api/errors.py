# SPDX-License-Identifier: Apache-2.0
"""Errors by boundary: each type says what its caller does, and carries the exit code of the command line.

Plugin authors raise plain Python errors; the core attributes them once (`PluginError`).
Every message is one sentence that names the field or boundary, what was received, and what to do.
"""

from __future__ import annotations


class RelaxError(Exception):
    """Stop the run: something failed that is nobody's configuration, plugin or machine."""

    exit_code = 1


class ConfigError(RelaxError):
    """Fix the configuration: a key, a value, a file or a combination is wrong."""

    exit_code = 2

    def __init__(self, field: str, got: object, fix: str) -> None:
        super().__init__(f"{field}: got {got}; {fix}")
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


class WorkerDied(InfrastructureError):
    """Replace the worker: its process ended or stopped answering."""


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
