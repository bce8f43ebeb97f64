# SPDX-License-Identifier: Apache-2.0
"""A record of what the workers of simulated runs are given."""

from __future__ import annotations

import pytest

from tests.unit.roles.simulated_run import Asked, record_calls


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return record_calls(monkeypatch)
