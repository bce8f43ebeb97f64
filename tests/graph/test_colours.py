# SPDX-License-Identifier: Apache-2.0
"""Pictures through the command line: written answers first, then sampled ones; a broken picture is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_contrib.recipes.colours.build import build
from relax_core.control.prepare import find_recipe
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
    overrides = ("eval.every=2", "stages.0.steps=2", "stages.0.rollout.groups_per_step=16", "stages.1.steps=2")
    overrides += ("rollout.media_store_mb=1",)
    ran = train_here(colours / "recipe.toml", *overrides, "--run-dir", tmp_path / "run")
    assert ran.code == 0, ran.err
    done = json.loads((tmp_path / "run/summary.json").read_text())
    dropped = done["samples_dropped"]
    assert (
        done["steps"] == 4 and set(dropped) == {"failed"} and dropped["failed"] > 8
    )  # a group of 8, and a written row
    assert done["samples_trained"] == 2 * 16 + 2 * 128
    assert done["samples_issued"] == done["samples_trained"] + dropped["failed"] + done["samples_in_flight"]
    for stage in ("0-warm-start", "1-rl"):
        assert 0 < len(list((tmp_path / "run/stages" / stage / "media").glob("*.media"))) <= 23 + 48
    rl = tmp_path / "run/stages/1-rl/media"
    assert sum(path.stat().st_size for path in rl.glob("*.media")) < 2 << 20, "what nobody needs stays over the budget"
    assert '<img alt="image ' in (tmp_path / "run/report.html").read_text()
    metrics = relax_metrics(tmp_path / "run")
    assert sum("eval/held-out/count" in one for one in metrics) == 4
    rates = [one["samples/per_s"] for one in metrics if "samples/per_s" in one]
    assert len(rates) == 4 and min(rates) > 0


def relax_metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
