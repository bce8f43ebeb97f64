# SPDX-License-Identifier: Apache-2.0
"""The configuration of a small run, and its plan."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.api.plan import Plan
from relax_core.config.compose import compose
from relax_core.config.run_config import RunConfig
from relax_core.control.planner import plan
from relax_core.registry.catalogue import Catalogue

BASE: dict[str, Any] = {
    "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algorithm": "grpo", "engine": "transformers",
    "trainer": "torch", "rewards": ["exact"],
}  # fmt: skip


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return Catalogue.load()


def configured(catalogue: Catalogue, *overrides: str, **layer: Any) -> RunConfig:
    """Return the base configuration with other tables and overrides; no file needs to exist."""
    return compose([{**BASE, **layer}], overrides, catalogue, on_disk=False).config


def planned(catalogue: Catalogue, *overrides: str, on_gpus: bool = False, **layer: Any) -> Plan:
    return plan(configured(catalogue, *overrides, **layer), catalogue, on_gpus)
