# SPDX-License-Identifier: Apache-2.0
"""`relax export`: the model of a run's checkpoint as a folder, equal to the model that the run wrote at that step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from relax_plugin_workbench.export import checkpoints
from transformers import AutoModelForCausalLM

import relax_core
from relax_core.api.errors import ConfigError
from tests.graph.conftest import Relax, exported, file_digest

pytestmark = pytest.mark.process


def test_the_export_of_the_last_checkpoint_equals_that_of_the_run(
    relax_here: Relax, whole: Path, tmp_path: Path
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*"))
    ran = relax_here("export", whole, "--out", tmp_path / "last" / "export", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["step"] == 6 and ran.json["directory"] == str(tmp_path / "last" / "export")
    assert exported(tmp_path / "last") == exported(whole)
    names = [sorted(path.name for path in (folder / "export").iterdir()) for folder in (whole, tmp_path / "last")]
    assert names[0] == names[1]

    earlier = relax_core.export(whole, tmp_path / "first" / "export", step=2)
    assert earlier == tmp_path / "first" / "export" and exported(tmp_path / "first") != exported(whole)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*")), "a run is only read"

    during = whole / "exports/step-000004"  # of export.every=4
    relax_core.export(whole, tmp_path / "fourth/export", step=4)
    assert [path.name for path in during.parent.iterdir()] == [during.name]
    assert names[0] == sorted(path.name for path in during.iterdir())
    assert exported(tmp_path / "fourth") == file_digest(during / "model.safetensors")
    assert AutoModelForCausalLM.from_pretrained(during).dtype.is_floating_point


def test_what_cannot_be_exported_is_refused(relax_here: Relax, whole: Path, tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("samples", "export"))
    mine.mkdir()
    (mine / "file").touch()
    damaged = next((run / "checkpoints/step-000006/trainer").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:1000])
    for words, code, said in (
        (("--out", mine), 2, f"--out: got {mine}, which exists; name a folder that is new or empty"),
        (("--step", "3"), 2, "--step: got 3; the run has checkpoints of these steps: 2, 4, 6"),
        ((), 4, f"checkpoint step-000006 is damaged: trainer/{damaged.name} has 1000 bytes, but "),
        (("--step", "4", "model.path=" + str(mine)), 2, "model.path"),
    ):
        refused = relax_here("export", run, "--out", tmp_path / "out", *words, "--json")
        assert refused.code == code and said in refused.json["error"], refused.json
    assert [path.name for path in mine.iterdir()] == ["file"] and not (tmp_path / "out").exists()


def test_steps_of_checkpoints_count_from_the_start_of_a_run_with_stages(tmp_path: Path) -> None:
    for stage, step in (("0-first", 2), ("1-second", 2), ("1-second", 4)):
        checkpoint = tmp_path / "stages" / stage / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").touch()
    (tmp_path / "stages/0-first/stage.json").write_text(json.dumps({"steps": 3}))
    assert [(step, owner.name) for step, (owner, _) in checkpoints(tmp_path).items()] == [
        (2, "0-first"), (5, "1-second"), (7, "1-second"),
    ]  # fmt: skip
    shutil.rmtree(tmp_path / "stages")
    with pytest.raises(ConfigError, match="no complete checkpoint; a live run writes one with `relax checkpoint RUN`"):
        checkpoints(tmp_path)
