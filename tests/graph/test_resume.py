# SPDX-License-Identifier: Apache-2.0
"""A run whose process was killed ends as if that had not happened; a change of the experiment on the way is refused."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from relax_core.api.weights import Version
from relax_core.bus.journal import LedgerJournal
from relax_core.control.prepare import prepare, prepare_resume
from tests.graph.conftest import Relax, relax_in
from tests.graph.exact import EXACT, STEPS, assert_ends_like, steps_of

pytestmark = pytest.mark.process
KILLED_AT, NEWEST = 5, 4
"""The driver dies in the record of this step; the newest checkpoint then is of this step."""
PLUGIN = f"""
import os, signal
from relax_core.api import hook

MARK = __file__ + ".killed"

@hook
def relax_step_finished(event):
    if event.step == {KILLED_AT} and not os.path.exists(MARK):
        open(MARK, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed")
    (directory / "last_words.py").write_text(PLUGIN)
    with relax_in(directory) as relax:
        killed = relax("train", tiny / "recipe.toml", *EXACT, "checkpoint.background=false",
                       f'plugins=["{directory / "last_words.py"}"]', "--runner", "inline",
                       "--run-dir", directory / "run")  # fmt: skip
    assert killed.code == -9, killed.err
    return directory / "run"


def test_a_run_that_begins_anew_without_a_checkpoint_has_an_incarnation_of_its_own(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare([tiny / "recipe.toml"], EXACT, run_dir=run).directory.close()
    journal = LedgerJournal(str(run))
    journal.remember(Version("actor", 4, 0))
    journal.close()
    again = prepare_resume(run, (), unfinished=True)
    again.directory.close()
    assert again.stages[0].launch.incarnation == 5


def test_a_change_of_the_experiment_and_steps_that_are_not_there_are_refused_and_begin_nothing(
    relax_here: Relax, killed_run: Path
) -> None:
    for words, said in (
        (("optimizer.lr=1.0",), "a change of the experiment; only "),
        ((f"steps={NEWEST}",), "which the run has reached; resume with more: steps=N"),
        (("--step", "3"), "the run has checkpoints of these steps: 2, 4"),
    ):
        refused = relax_here("resume", killed_run, *words, "--json")
        assert refused.code == 2 and said in refused.json["error"]
    assert int((killed_run / ".epoch").read_text()) == 1


def test_a_killed_run_without_its_ledger_and_newest_checkpoint_ends_like_the_untouched_one(
    relax: Relax, relax_here: Relax, killed_run: Path, tmp_path: Path, whole: Path
) -> None:
    run = shutil.copytree(killed_run, tmp_path / "run")
    (run / "ledger.db").unlink()
    damaged = next((run / f"checkpoints/step-{NEWEST:06d}/trainer").glob("shard-00001-*.safetensors"))
    with damaged.open("r+b") as file:
        file.truncate(1000)

    resumed = relax("resume", run, "--json")
    assert resumed.code == 0, resumed.err
    assert f"trainer/{damaged.name} has 1000 bytes, but " in resumed.err
    assert f"resuming from step {NEWEST - 2} before it" in resumed.err
    assert re.search(r"ledger\.db is missing: .* the copy in .*/checkpoints/step-000002\n", resumed.err)
    assert_ends_like(whole, run, resumed.json)
    with sqlite3.connect(f"file:{run}/ledger.db?mode=ro", uri=True) as ledger:
        counted = Counter(ledger.execute("SELECT number, sample FROM ended WHERE reason = ''").fetchall())
        ((folded,),) = ledger.execute("SELECT coalesce(sum(attempts), 0) FROM folded WHERE reason = ''").fetchall()
    ledger.close()
    assert len(counted) + folded == STEPS * 16 and set(counted.values()) <= {1}, "no sample is trained twice"

    # As if the process had been killed between the two renames that put another export in place.
    (run / "summary.json").unlink()
    (run / "export").rename(run / ".export.77.old")
    ended = relax_here("resume", run, "--json")
    assert (ended.code, ended.json["steps"]) == (0, STEPS), ended.err
    assert (run / "export/config.json").is_file() and not list(run.glob(".export*"))
    over = relax_here("resume", run, "--json")
    assert over.code == 2 and "which the run has reached; resume with more: steps=N" in over.json["error"]


@pytest.mark.faults  # a whole run on three more processes
def test_a_resume_on_more_ranks_gives_the_same_losses(
    relax: Relax, killed_run: Path, tmp_path: Path, whole: Path
) -> None:
    run = shutil.copytree(killed_run, tmp_path / "run")
    resumed = relax("resume", run, "placement.actor.ranks=2", "--json", "run.runner=local")
    assert resumed.code == 0, resumed.err
    found, expected = steps_of(run), steps_of(whole)
    assert found[:NEWEST] == expected[:NEWEST]
    for have, want in zip(found[NEWEST:], expected[NEWEST:], strict=True):
        assert have == pytest.approx(want, rel=2e-3, abs=1e-5)
