# SPDX-License-Identifier: Apache-2.0
"""An algorithm that looks at all rows of a step before its first update: they come whole, and its column goes with them."""

import pytest

from tests.unit.roles import simulated_run
from tests.unit.roles.simulated_run import SimulatedRun


@pytest.mark.parametrize("updates", [1, 2])
def test_rows_have_what_was_prepared_of_the_whole_step(tmp_path, monkeypatch, updates):
    seen = []
    call = simulated_run.SimulatedWorker.call

    async def listening(self, method, *args, timeout_s):
        if method == "accumulate":
            seen.append(args[0].rows)
        return await call(self, method, *args, timeout_s=timeout_s)

    monkeypatch.setattr(simulated_run.SimulatedWorker, "call", listening)
    stage = SimulatedRun(tmp_path, algorithm="m2po", placement="async", steps=3, batch={"updates_per_step": updates})
    assert not stage.launch.plan.streams and stage.launch.plan.needs_old_log_probs
    outcome = stage.run()
    assert outcome.account.trained == 3 * 16 and len(seen) == 3 * updates
    assert all({"old_log_probs", "trusted"} <= rows.columns.keys() for rows in seen)
    assert {value for rows in seen for value in rows.columns["trusted"].values.tolist()} <= {0.0, 1.0}
