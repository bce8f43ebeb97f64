# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong: one error that says field, got and fix, the right exit code, a readable run, nothing left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.graph.conftest import SMALL as STEP, Ran, Relax

pytestmark = pytest.mark.process
SMALL = (*STEP, "steps=3", "run.runner=local", "checkpoint.every=1")
REWARDS = """
import os
from pathlib import Path
from relax_core.api import Reward

class Typo(Reward):
    def score(self, task, trajectory):
        return float(trajectory.respons == task.answer)

class Spin(Reward):
    def score(self, task, trajectory):
        spun = Path(__file__).parent / "spun"  # a folder that was there before: beside the run it may make nothing
        try:
            os.close(os.open(spun / task.id.partition(":")[2], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return float(trajectory.response[:1] == task.answer[:1])
        while len(list(spun.iterdir())) < 3:
            pass
        return 0.0
"""


def refused(ran: Ran, exit_code: int, *said: str) -> None:
    """One document on stdout, one error at the end of stderr, and no frame of the core."""
    assert ran.code == exit_code, ran.err
    document = ran.json
    assert document["exit_code"] == exit_code
    lines = ran.err.strip().splitlines()
    assert f"relax: {document['error']}".splitlines()[-1] == lines[-1]
    for words in said:
        assert words in document["error"]
    assert "relax_core" not in "".join(line for line in lines if line.lstrip().startswith("File "))
    assert ran.err.count(document["error"]) == 1


def readable(relax: Relax, run: Path, state: str = "failed") -> None:
    """Reading verbs take the run as it lies there."""
    assert state in relax("status", run).out
    assert relax("report", run).code == 0
    assert open_run(run).summary()["status"] == state


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.path=nowhere", "nowhere, a folder that does not exist; name the folder of a Hugging Face model"),
        ("stepz=3", "stepz (command line): got an unknown key; did you mean 'steps'?"),
        ("algorithm=grppo", "algorithm.name (command line): got 'grppo'; no plugin offers it; did you mean 'grpo'"),
        ("rollout.group_size=1", "rollout.group_size (command line): got 1; grpo compares the samples of a task"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_before_anything_starts(
    relax_here: Relax, tiny: Path, tmp_path: Path, override: str, said: str
) -> None:
    """One of each place that looks: model folder, schema, catalogue, plan."""
    refused(relax_here("train", tiny / "recipe.toml", *SMALL, override, "--run-dir", "run", "--json"), 2, said)
    assert not (tmp_path / "run").exists()


def test_several_problems_are_reported_together_one_per_line(relax_here: Relax, tiny: Path) -> None:
    ran = relax_here(
        "train", tiny / "recipe.toml", *SMALL, "rollout.group_size=1", "rollout.max_new_tokens=4096", "--json"
    )
    assert ran.code == 2
    assert [error["field"].split()[0] for error in ran.json["errors"]] == [
        "rollout.group_size",
        "rollout.max_new_tokens",
    ]
    assert len(ran.err.strip().splitlines()) == 3


def test_unknown_words_on_the_command_line_give_one_json_document(relax_here: Relax) -> None:
    ran = relax_here("train", "x.toml", "--stepz", "--json")
    assert ran.code == 2 and "--stepz" in ran.json["error"] and "--stepz" in ran.err
    refused(relax_here("train", "x.toml", "--json"), 2, "x.toml, which does not exist; name a TOML file or a recipe")


def test_a_task_file_that_cannot_be_used_ends_the_run_with_its_line(
    train_here: Relax, relax_here: Relax, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "s21=", "answer": "12"}\n{"prompt": "s3\n')
    ran = train_here(tiny / "recipe.toml", *SMALL, "data.train=tasks.jsonl", "--run-dir", "run")
    refused(ran, 2, "data.train: got ", "tasks.jsonl:2: malformed JSON")
    readable(relax_here, tmp_path / "run")


def test_a_run_directory_in_use_is_refused_and_left_as_it_is(relax_here: Relax, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    ran = relax_here("train", tiny / "recipe.toml", *SMALL, "--run-dir", "run", "--json")
    refused(ran, 2, "run_dir: got run, which is not empty; name a new directory")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_reward_with_a_typo_stops_the_run_and_leaves_a_sample_to_try_it_on(
    train_here: Relax, relax_here: Relax, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    typo = ('plugins=["mine.py"]', 'rewards=["typo"]')
    ran = train_here(tiny / "recipe.toml", *SMALL, *typo, "--run-dir", "run")
    line = REWARDS.splitlines().index("        return float(trajectory.respons == task.answer)") + 1
    missing = "'Trajectory' object has no attribute 'respons'"
    refused(ran, 3, "reward typo: failed alike on the first 16 samples", missing, f"mine.py:{line}")
    assert "Traceback" not in ran.err and "RELAX_TRACEBACK=1 shows" in ran.err
    readable(relax_here, tmp_path / "run")
    (tmp_path / "mine.py").write_text(REWARDS.replace("respons ", "response "))
    tried = relax_here("try", "reward", "typo", "--data", tmp_path / "run/failing-sample.json", "--json")
    assert tried.code == 0
    assert [sample["outcome"] for sample in json.loads(tried.out)] == ["finished"]


@pytest.mark.faults
def test_a_reward_that_spins_is_killed_and_the_run_continues(relax: Relax, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "spun").mkdir()
    spin = ('plugins=["mine.py"]', 'rewards=[{name="spin", timeout_s=1.0, writable=["spun"]}]')
    ran = relax("train", tiny / "recipe.toml", *SMALL, *spin, "--run-dir", "run", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["status"] == "finished" and ran.json["steps"] == 3 and ran.json["balanced"]
    samples = [sample for step in (1, 2, 3) for sample in open_run(tmp_path / "run").samples(step)]
    timed_out = [sample for sample in samples if sample["outcome"] == "reward_timeout"]
    assert timed_out and all("did not answer within timeout_s = 1" in sample["error"] for sample in timed_out)
    assert {sample["outcome"] for sample in samples} > {"reward_timeout"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_ends_the_run_with_what_was_written_before(
    train_here: Relax, relax_here: Relax, tiny: Path, small_disk: Path
) -> None:
    ran = train_here(tiny / "recipe.toml", *SMALL, "steps=8", "checkpoint.keep=9", "--run-dir", small_disk / "run")
    refused(ran, 4, str(small_disk), "free")
    checkpoints = sorted(path.name for path in (small_disk / "run/checkpoints").iterdir())
    assert checkpoints and all(name.startswith("step-") for name in checkpoints)
    readable(relax_here, small_disk / "run")
    for name in checkpoints[:-1]:
        shutil.rmtree(small_disk / "run/checkpoints" / name)
    resumed = relax_here("resume", small_disk / "run", "checkpoint.keep=1", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] == 8
