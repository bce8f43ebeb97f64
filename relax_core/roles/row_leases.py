# SPDX-License-Identifier: Apache-2.0
"""Renewal of row leases during long work on their rows.

The bus takes rows back minutes after the last use of their lease, but a role may wait for devices for an hour before it
computes. A role with a stuck process does not renew its leases, so it loses its rows. A role that exceeds the time
limit of its work loses its rows, too.
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
"""Seconds between renewals, far below the lease time of the bus."""


@contextlib.asynccontextmanager
async def renewed(
    context: RunContext, waiter: str, claims: Callable[[], Sequence[Claim]], limit_s: float = math.inf
) -> AsyncIterator[None]:
    """Renew the row leases of `claims()` while the body runs. After `limit_s` seconds DeadlineExceeded ends the body.

    A lost lease is not renewed again; the next use of its claim raises StaleFence. Different errors of the bus end
    the body.
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
        raise DeadlineExceeded(waiter, what, limit_s, "the rows are given back; look at the role's log")

    async with attended(renew()):
        yield
