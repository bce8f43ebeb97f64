# SPDX-License-Identifier: Apache-2.0
"""What the journal keeps: one small tuple for each fact that must outlive the process, in the order they happened.

`step` is the version that was completed: what trained version 3 has step 3.
"""

from __future__ import annotations

from typing import NamedTuple

from relax_core.api.batch import AttemptId


class Issued(NamedTuple):
    """A group was issued; the data cursor is behind it."""

    group: int
    issue: int
    retry: int
    size: int


class Ended(NamedTuple):
    """An attempt was trained (no reason) or dropped."""

    attempt: AttemptId
    reason: str
    step: int | None
    newest: int
    with_gradient: bool


class Trained(NamedTuple):
    """A group was trained; the `Ended` of its members follow."""

    group: int
    step: int


class Pending(NamedTuple):
    """A group is to be issued again."""

    group: int
    retry: int


class Stepped(NamedTuple):
    """The actor has completed this version."""

    step: int
    incarnation: int


class RolledBack(NamedTuple):
    """Versions after this one are undone; what becomes of their samples follows."""

    step: int
    incarnation: int


class Registered(NamedTuple):
    """A role's newest incarnation."""

    role: str
    incarnation: int


class Checkpointed(NamedTuple):
    """A checkpoint of this version exists."""

    step: int
    incarnation: int


class Noted(NamedTuple):
    """A producer's own state at a version."""

    name: str
    step: int
    value: str


Record = Issued | Ended | Trained | Pending | Stepped | RolledBack | Registered | Checkpointed | Noted


class Remembered(NamedTuple):
    """What a journal gives to a bus that opens it."""

    next_group: int = 0
    pending: tuple[tuple[int, int, int], ...] = ()
    """(group, issues so far, retry) to be issued again."""
    issued: int = 0
    trained: int = 0
    trained_without_gradient: int = 0
    dropped: tuple[tuple[str, int], ...] = ()
    roles: tuple[tuple[str, int], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
