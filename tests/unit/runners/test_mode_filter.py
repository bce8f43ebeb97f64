# SPDX-License-Identifier: Apache-2.0
"""The filter refuses the same calls on every machine; `test_keeper.py` shows it at work."""

from __future__ import annotations

import pytest

from relax_core.runners.local import mode_filter
from relax_core.runners.local.mode_filter import ALLOWED, ENDS, MACHINES, REFUSED

CHMOD, READ = {"x86_64": 90, "aarch64": 53}, {"x86_64": 0, "aarch64": 63}


@pytest.mark.parametrize("machine", MACHINES)
def test_mode_changes_are_refused_under_every_number(machine: str) -> None:
    architecture, calls = MACHINES[machine]
    assert CHMOD[machine] in calls
    assert {answer(machine, architecture, call) for call in (*calls, 425, 452, 463, 466, 0x40000000 + 90)} == {REFUSED}
    assert answer(machine, architecture, READ[machine]) == ALLOWED
    assert answer(machine, 0x40000003, READ[machine]) == ENDS, "32-bit calls have other numbers"


def answer(machine: str, architecture: int, call: int) -> int:
    """Run the filter as the kernel would."""
    code, at, value = mode_filter.instructions(machine), 0, 0
    while True:
        what, true, false, operand = code[at]
        at += 1
        if what == mode_filter.RETURN:
            return operand
        if what == mode_filter.LOAD:
            value = {0: call, 4: architecture}[operand]
        else:
            holds = value == operand if what == mode_filter.EQUAL else value > operand
            at += true if holds else false
