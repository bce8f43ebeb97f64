# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the runs whose processes are killed by hand, and the mark that keeps these tests out of the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graph.conftest import relax, start, tiny, whole

__all__ = ["relax", "start", "tiny", "whole"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("faults")
            item.add_marker("process")
