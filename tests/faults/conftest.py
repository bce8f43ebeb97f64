# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the runs whose processes are killed by hand, and the mark that keeps these tests out of the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graph.conftest import relax, start, tiny
from tests.graph.exact import train_exactly
from tests.graph.gated import gated
from tests.shared_folder import shared_folder

__all__ = ["relax", "start", "tiny"]
LONG = ("steps=16", "checkpoint.every=4")


@pytest.fixture(scope="session")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic run of 16 steps without faults, through the environment of the runs that are struck.

    Requests of an environment reach the engine in other batches than those of plain prompts, which changes last bits.
    """

    def train(folder: Path) -> None:
        train_exactly(tiny / "recipe.toml", folder / "run", *LONG, *gated(folder / "run"))

    return shared_folder(tmp_path_factory, "long-whole", train) / "run"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/faults/"):
            item.add_marker("faults")
            item.add_marker("process")
