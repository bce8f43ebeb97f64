# SPDX-License-Identifier: Apache-2.0
"""RowLeases on claimed rows: a late holder changes nothing."""

from __future__ import annotations

import pytest

from relax_core.api.bus import Claim
from relax_core.api.errors import StaleFence
from relax_core.bus.leases import RowLease, RowLeases

LEASE_S = 10.0


def claim_of(lease: RowLease) -> Claim:
    return Claim(lease.number, lease.task, lease.rows, {}, lease.groups)


def test_a_lease_is_its_holders_until_it_expires_and_each_use_renews_it() -> None:
    leases = RowLeases(LEASE_S)
    claim = claim_of(leases.grant("actor.fit", (0, 1), (), True, 0.0))
    assert leases.check(claim, 9.0).expires == 19.0
    assert leases.check(claim, 18.9).groups == (0, 1)
    with pytest.raises(StaleFence, match="lease 1 of task actor.fit has expired; drop the claim and claim again"):
        leases.check(claim, 28.9)


@pytest.mark.parametrize("end", [RowLeases.finish, RowLeases.revoke])
def test_a_lease_that_ended_is_nobodys(end) -> None:
    leases = RowLeases(LEASE_S)
    lease = leases.grant("reference.log_probs", (0,), (), False, 0.0)
    end(leases, lease)
    with pytest.raises(StaleFence, match="has ended"):
        leases.check(claim_of(lease), 1.0)


def test_groups_of_a_revoked_lease_go_to_the_next_claim_and_those_of_a_finished_one_do_not() -> None:
    leases = RowLeases(LEASE_S)
    leases.finish(leases.grant("critic.values", (0,), (), False, 0.0))
    leases.revoke(leases.grant("critic.values", (1,), (), False, 0.0))
    assert leases.done["critic.values"] == {0}
