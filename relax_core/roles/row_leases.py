# SPDX-License-Identifier: Apache-2.0
"""Renewal of row leases beside the work on their rows.

The bus takes rows back after minutes without a use of their lease, while rows may wait for an hour for devices and then
be computed on. A role whose process is stuck renews nothing, and loses its rows; so does one whose work never ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence

from relax_core.api.bus import Claim
from relax_core.api.errors import DeadlineExceeded, StaleFence
from relax_core.config.run_config import RunContext
from relax_core.rpc.waiting import attended

RENEW_S = 60.0
"""Between renewals, far below the time after which the bus takes rows back."""


@contextlib.asynccontextmanager
async def renewed(
    context: RunContext, owner: str, claims: Callable[[], Sequence[Claim]], limit_s: float = math.inf
) -> AsyncIterator[None]:
    """Renew the leases of these claims while the body works on them, at most for `limit_s`: then DeadlineExceeded ends it.

    A lease that was lost is not looked at again: the next use of its claim says so. Any other error of the bus ends the body.
    """

    async def renew() -> None:
        until, lost = context.clock.now() + limit_s, set[int]()
        while context.clock.now() < until:
            await context.clock.sleep(min(RENEW_S, until - context.clock.now()))
            for claim in [claim for claim in claims() if claim.lease not in lost]:
                try:
                    await context.bus.verify(claim)
                except StaleFence:
                    lost.add(claim.lease)
        what = "its work on claimed rows to end"
        raise DeadlineExceeded(owner, what, limit_s, "the rows are given back; look at the role's log")

    async with attended(renew()):
        yield
