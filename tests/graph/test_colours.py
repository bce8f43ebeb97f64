# SPDX-License-Identifier: Apache-2.0
"""Pictures through the command line: written answers first, then sampled ones; a broken picture is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_contrib.recipes.colours.build import build
from relax_core.control.prepare import find_recipe
from relax_core.views.run import open_run
from tests.graph.conftest import Relax


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    build(folder, seed=0)
    (folder / "recipe.toml").write_text(find_recipe("colours").toml())
    for name, count in (("train.jsonl", 24), ("eval.jsonl", 48)):
        rows = (folder / name).read_text().splitlines()[:count]
        (folder / name).write_text("\n".join(rows))
    rows = (folder / "train.jsonl").read_text().splitlines()
    broken = json.loads(rows[5])["prompt"][0]["content"][0]["image"]
    (folder / broken).write_bytes((folder / broken).read_bytes()[:200])
    return folder


def test_a_model_that_sees_is_warmed_up_and_reinforced(train_here: Relax, colours: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ran = train_here(colours / "recipe.toml", "eval.every=2", "stages.0.steps=2", "stages.0.rollout.groups_per_step=16",
                     "stages.1.steps=2", "rollout.media_store_mb=1", "--run-dir", run)  # fmt: skip
    assert ran.code == 0, ran.err
    done = json.loads((run / "summary.json").read_text())
    dropped = done["samples_dropped"]
    assert done["steps"] == 4
    assert set(dropped) == {"failed"} and dropped["failed"] > 8, "a group of 8, and a written row"
    assert done["samples_trained"] == 2 * 16 + 2 * 128
    assert done["samples_issued"] == done["samples_trained"] + dropped["failed"] + done["samples_in_flight"]
    for stage in ("0-warm-start", "1-rl"):
        assert 0 < len(list((run / "stages" / stage / "media").glob("*.media"))) <= 23 + 48
    kept = (run / "stages/1-rl/media").glob("*.media")
    assert sum(path.stat().st_size for path in kept) < 2 << 20, "what nobody needs stays over the budget"
    assert '<img alt="image ' in (run / "report.html").read_text()
    assert (run / "metrics.jsonl").read_text().count('"eval/held-out/count"') == 4, "before and after each stage"
    metrics = open_run(run).metrics()
    assert len(metrics.column("samples/per_s")) == 4 and min(metrics.column("samples/per_s")) > 0
