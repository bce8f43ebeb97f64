# SPDX-License-Identifier: Apache-2.0
"""The environment keeps what every environment promises."""

from __future__ import annotations

from pathlib import Path

from relax_core.testing.environment import EnvironmentSuite


class TestSearch(EnvironmentSuite):
    component = "search"
    options = {"corpus": str(Path(__file__).with_name("documents.jsonl"))}
