# SPDX-License-Identifier: Apache-2.0
"""A gate for scripted engines, which are in the middle of what they do until a test opens it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engines.pool_fixtures import Gate
from tests.unit.engines.scripted_engine import GATE


@pytest.fixture(scope="session")
def gate_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One path for all tests: each environment of engines has a fork server of its own."""
    return tmp_path_factory.mktemp("gate") / "gate"


@pytest.fixture
def gate(gate_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Shut for the engines of this test."""
    gate_path.unlink(missing_ok=True)
    monkeypatch.setenv(GATE, str(gate_path))
    return Gate(gate_path)
