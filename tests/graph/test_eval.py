# SPDX-License-Identifier: Apache-2.0
"""`relax eval`: a run, a checkpoint and a model folder are evaluated as the run itself would evaluate them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from relax_plugin_workbench.eval_result import EvalResult
from relax_plugin_workbench.evaluate import find_target

import relax_core
from relax_core.api.errors import ConfigError
from relax_core.observe.redaction import Redactor
from relax_core.views.run import open_run
from tests.graph.conftest import Relax

pytestmark = pytest.mark.process

SETS = """
rewards = [{name = "exact", only = "eval_set=sampled"}, {name = "exact", label = "other", only = "otherwise"}]
[eval]
sets = [
    {name = "sampled", path = "FILE", size = 4, samples = 4},
    {name = "short", path = "FILE", size = 4, temperature = 0, max_new_tokens = 2},
]
"""


def test_a_checkpoint_is_evaluated_as_by_its_run_and_compared_with_an_earlier_result(
    relax_here: Relax, whole: Path, tmp_path: Path
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*"))
    recorded = {one["step"]: one for one in open_run(whole).evaluations()}
    earlier = EvalResult("run", 6, 0, (recorded[6],), tmp_path / "six")
    earlier.write("", (), Redactor([]))
    evaluated = relax_here("eval", f"{whole}@4", "--against", tmp_path / "six", "--json")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json["sets"][0]["tasks"] == recorded[4]["tasks"] and evaluated.json["sets"][0]["count"] == 8
    folder = tmp_path / "evals" / "run-step-4"
    assert evaluated.json["directory"] == str(folder)
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 8

    (compared,) = evaluated.json["comparison"]
    assert (compared["first_step"], compared["second_step"], compared["paired"]["tasks"]) == (6, 4, 8)
    of_files = relax_here("compare", tmp_path / "six", folder, "--json")
    assert of_files.json["sets"] == [compared]
    assert before == sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*")), "a run is only read"


def test_each_set_has_its_own_reward_temperature_and_length_for_a_run_and_a_model_folder(
    whole: Path, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "sets.toml").write_text(SETS.replace("FILE", str(tiny / "eval.jsonl")))
    result, compared = relax_core.evaluate(whole, tmp_path / "sets.toml", against=tiny / "model", out=tmp_path / "out")
    assert [(one["set"], one["count"], one["temperature"]) for one in result.sets] == [
        ("sampled", 16, 1.0),
        ("short", 4, 0.0),
    ]
    assert {"best_of_2", "best_of_4"} <= result.sets[0]["metrics"].keys()
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {(one["set"], *one["rewards"]) for one in samples} == {("sampled", "exact"), ("short", "other")}
    assert {one["num_tokens"] for one in samples if one["set"] == "short"} <= {1, 2}
    assert max(one["num_tokens"] for one in samples if one["set"] == "sampled") > 2
    assert [(one.set_name, one.paired.tasks) for one in compared] == [("sampled", 4), ("short", 4)]
    assert (tmp_path / "out" / "against" / "eval.json").is_file()


def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    relax_here: Relax, whole: Path, tiny: Path, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for words, said in (
        ((tiny / "model",), "eval.sets: got nothing; name the tasks"),
        ((full,), f"TARGET: got {full}; name a Hugging Face folder"),
        ((f"{whole}@5",), "run@5; the run has checkpoints of these steps: 2, 4, 6"),
        ((whole, "--out", full), f"--out: got {full}, which exists"),
        ((whole, "rewards=[]"), "rewards (command line): got nothing"),
        ((whole, "--against", full), f"TARGET: got {full}; name a Hugging Face folder"),
    ):
        refused = relax_here("eval", *words, "--json")
        assert refused.code == 2 and said in refused.json["error"], refused.json
    assert not (tmp_path / "evals").exists()


def test_a_run_means_its_final_model_and_a_checkpoint_its_run_at_this_step(whole: Path, tmp_path: Path) -> None:
    final = find_target(str(whole))
    assert (final.run, final.step, final.folder) == (whole, 6, whole / "export")
    found = find_target(str(whole / "checkpoints" / "step-000004"))
    assert (found.run, found.step, found.folder) == (whole, 4, None)
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000004" / "state.json").touch()
    with pytest.raises(ConfigError):
        find_target(str(tmp_path / "step-000004"))
