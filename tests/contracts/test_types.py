# SPDX-License-Identifier: Apache-2.0
"""These examples are held against the contracts' types, strictly, as a plugin author's would be."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_the_examples_are_typed_as_the_contracts_ask() -> None:
    api = pytest.importorskip("mypy.api")
    here = Path(__file__).parent
    config = here.parents[1] / "pyproject.toml"
    report, _, status = api.run(["--config-file", str(config), *map(str, sorted(here.glob("*.py")))])
    assert status == 0, report
