# SPDX-License-Identifier: Apache-2.0
"""A run whose processes die at named points ends as the run that lost nothing; each runner makes one such run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graph.conftest import Relax
from tests.graph.exact import EXACT, assert_ends_like
from tests.graph.failing import failing

pytestmark = pytest.mark.process


def test_a_run_that_loses_an_engine_a_reward_and_a_rank_ends_with_the_same_weights(
    relax: Relax, runner: str, tiny: Path, tmp_path: Path, whole: Path
) -> None:
    run = tmp_path / "run"
    ran = relax("train", tiny / "recipe.toml", *EXACT, "eval.every=0", *failing(tmp_path / "marks"), "--runner", runner,
                "--run-dir", run, "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert {path.stem for path in (tmp_path / "marks").glob("*.died")} == {"engine", "reward", "rank"}
    assert ran.json["restarts"] == {"engine": 1, "actor": 1, "reward-failing-reward-0": 1}, ran.err
    assert_ends_like(whole, run, ran.json)
