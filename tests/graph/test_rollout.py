# SPDX-License-Identifier: Apache-2.0
"""`relax rollout`: a folder of samples is continued after a kill, ends as without one, and can be trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.graph.conftest import Relax

pytestmark = pytest.mark.process

SMALL = ("rollout.groups_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "deterministic=true",
         "max_staleness=0", "placement=colocate", "run.runner=inline")  # fmt: skip
TRAIN = ("steps=2", "rollout.groups_per_step=3", "eval.every=0", "run.runner=inline")
SFT = """
algorithm = "sft"
rewards = []
model = {path = "MODEL"}
data = {train = "DATA", columns = {completion = "response"}}
"""


def test_a_folder_of_samples_is_continued_and_extended_and_ends_as_if_it_was_written_at_once(
    relax_here: Relax, tiny: Path, tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    ran = relax_here("rollout", tiny / "recipe.toml", *SMALL, "-n", "3", "--out", whole, "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["tasks"], ran.json["added"], ran.json["judged"], ran.json["failed"]) == (3, 3, 6, 0)
    samples = (whole / "samples.jsonl").read_bytes().splitlines(keepends=True)

    part.mkdir()
    (part / "config.toml").write_bytes((whole / "config.toml").read_bytes())
    (part / "samples.jsonl").write_bytes(b"".join(samples[:3]) + samples[3][:20])
    again = relax_here("rollout", tiny / "recipe.toml", *SMALL, "--tasks", "3", "--out", part, "--json")
    assert again.code == 0, again.err
    assert (again.json["tasks"], again.json["added"]) == (3, 2)
    assert again.json["mean"] == ran.json["mean"]
    assert sorted((part / "samples.jsonl").read_bytes().splitlines(keepends=True)) == sorted(samples)

    enough = relax_here("rollout", tiny / "recipe.toml", *SMALL, "-n", "2", "--out", part)
    assert enough.code == 0 and enough.out.startswith("3 tasks (0 new), 6 samples, 0 failed, mean reward ")
    other = relax_here("rollout", tiny / "recipe.toml", *SMALL, "seed=9", "-n", "3", "--out", part, "--json")
    assert other.code == 2 and "another configuration: now seed = 9" in other.json["error"]

    (tmp_path / "sft.toml").write_text(
        SFT.replace("MODEL", str(tiny / "model")).replace("DATA", str(part / "samples.jsonl"))
    )
    checked = relax_here("data", "check", tmp_path / "sft.toml", "--json")
    (file,) = json.loads(checked.out)["files"]
    assert checked.code == 0 and file["usable"] == 6 and file["bad"] == [], checked.out

    table = relax_here(
        "rollout", tiny / "recipe.toml", *SMALL, "-n", "3", "--out", whole, "--format", "parquet", "--json"
    )
    assert table.code == 0 and table.json["file"] == str(whole / "samples.parquet"), table.err
    trained = relax_here("train", tmp_path / "sft.toml", *TRAIN, f"data.train={whole}", "--json")
    assert trained.code == 0, trained.err
    assert (trained.json["steps"], trained.json["samples_trained"], trained.json["balanced"]) == (2, 6, True)
    refused = relax_here("train", tmp_path / "sft.toml", *TRAIN, f"data.train={whole}", "data.columns.completion=text")
    assert refused.code == 2 and "no row has the column 'text'" in refused.err

    more = relax_here("rollout", tiny / "recipe.toml", *SMALL, "-n", "4", "--out", whole, "--json")
    assert more.code == 0 and more.json["added"] == 1 and not (whole / "samples.parquet").exists()


def test_a_folder_with_other_files_and_a_recipe_are_refused(relax_here: Relax, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for source, out, said in (
        (tiny / "recipe.toml", "full", "--out: got "),
        ("quickstart", "new", "got the name of a recipe; give the TOML file"),
    ):
        refused = relax_here("rollout", source, "-n", "1", "--out", tmp_path / out, "--json")
        assert refused.code == 2 and said in refused.json["error"], refused.json
    assert not (tmp_path / "new").exists()
