# SPDX-License-Identifier: Apache-2.0
"""A whole run whose weights go from memory to memory; an engine that dies is replaced and gets the weights again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graph.conftest import Relax
from tests.graph.failing import failing_engine

pytestmark = pytest.mark.process
LIVE = ("weights=collective", "weights.payload=delta", "weights.silence_s=10", "steps=6", "rollout.prompts_per_step=8",
        "eval.every=0", "checkpoint.every=0")  # fmt: skip


def test_live_deltas_reach_the_engine_and_the_one_that_replaces_it(relax: Relax, tiny: Path, tmp_path: Path) -> None:
    ran = relax("train", tiny / "recipe.toml", *LIVE, *failing_engine(tmp_path / "marks"), "--runner", "local",
                "--run-dir", tmp_path / "run", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert (ran.json["status"], ran.json["steps"], ran.json["restarts"]) == ("finished", 6, {"engine": 1})
    assert ran.json["balanced"] and ran.json["max_lag"] == 0
    assert not (tmp_path / "run" / "weights").exists() or list((tmp_path / "run" / "weights").iterdir()) == []
