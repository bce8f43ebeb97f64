# SPDX-License-Identifier: Apache-2.0
"""A gate for scripted engines, which are in the middle of what they do until a test opens it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engines.pool_fixtures import Gate
from tests.unit.engines.scripted_engine import GATE


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Shut for the engines of this test."""
    monkeypatch.setenv(GATE, str(tmp_path / "gate"))
    return Gate(tmp_path / "gate")
