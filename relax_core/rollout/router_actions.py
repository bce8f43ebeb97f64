# SPDX-License-Identifier: Apache-2.0
"""What the router wants done: whoever has the engines does it, in this order, and tells the router what came of it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from relax_core.rollout.requests import Pending


class Give(NamedTuple):
    """Ask an engine to continue these, in one call. `life`: which of the engine's lives the answers belong to."""

    engine: str
    life: int
    batch: tuple[Pending, ...]


class Abort(NamedTuple):
    """Tell an engine to end these now."""

    engine: str
    ids: list[str]


class Answer(NamedTuple):
    """A request is over: whoever asked gets its completion. Each is answered once."""

    request: Pending


class Quarantine(NamedTuple):
    """An engine died, hangs or lies: end it, start a fresh one, bring it the newest weights, then say that it entered."""

    engine: str
    why: str


class GiveUp(NamedTuple):
    """No engine can be had: nothing that is asked would ever be answered."""

    why: str


Action: TypeAlias = Give | Abort | Answer | Quarantine | GiveUp
