# SPDX-License-Identifier: Apache-2.0
"""The configuration table `[notify]`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from relax_core.api.options import Secret, TableOptions

NoticeKind = Literal["start", "stall", "divergence", "recovery", "end"]


class NotifyTable(TableOptions):
    """Messages to people about events of the run: addresses, kinds of events and limits."""

    may_change: ClassVar[tuple[str, ...]] = ("*",)
    of_the_run: ClassVar[bool] = True

    urls: tuple[Secret, ...] = ()
    """Apprise addresses, each written as `"env:NAME"` or `"file:PATH"` because addresses contain credentials."""
    events: tuple[NoticeKind, ...] = ("start", "stall", "divergence", "recovery", "end")
    """Kinds of messages: `start` and `end` of the run, the latter with the reason; `stall`: a wait exceeds its deadline
    or `stall_s`; `divergence`: a guard fires; `recovery`: a role, a worker or the run is replaced, rolled back or works
    again."""
    burst: PositiveInt = 5
    """Most messages sent at once; after that, one more message per `every_s`. Further messages are dropped, and the
    next message gives their number. Messages about the start, the end, and a guard that pauses, rolls back or stops the
    run are always sent."""
    every_s: PositiveFloat = 300.0
    """Seconds until one more message may be sent, once `burst` messages were sent."""
    stall_s: PositiveFloat = 3600.0
    """Seconds that one wait of a role may last before a message reports the wait."""
    timeout_s: PositiveFloat = 15.0
    """Seconds to send a message to one address; a slower address gets no further messages."""
    samples: bool = False
    """Quote plugin errors, and a sample of a step at which a guard fires; both may contain texts of tasks and of the
    policy. False: messages contain no such texts."""
