# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped or killed ends as if it never had been; what may not change on the way is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from relax_core.views.run import open_run
from tests.graph.conftest import Relax, command, environment, survivors
from tests.graph.exact import EXACT, assert_ends_like
from tests.graph.gated import gated, open_gate, shut

SMALL = ("run.runner=local", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.every=0", "checkpoint.every=4")
DEADLINE_S = 400.0
GATE = 12
"""Steps after which a run that is struck stands still until it has been."""


def broken_off(
    words: tuple[str | Path, ...], directory: Path, number: signal.Signals, when: Callable[[], bool],
    then: Callable[[], object] = lambda: None,
) -> int:  # fmt: skip
    """Run `relax`, send it a signal once `when` holds, do `then`, wait until nothing of it is left; its exit code."""
    with (directory / "stderr").open("w") as err:
        process = subprocess.Popen(
            command(*words), cwd=directory, env=environment(), stdout=subprocess.DEVNULL, stderr=err
        )
        wait_until(lambda: when() or process.poll() is not None)
        process.send_signal(number)
        then()
        code = process.wait(DEADLINE_S)
    wait_until(lambda: not survivors(directory))
    return code


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps(run: Path) -> list[int]:
    """The steps that a run has written whole."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = (json.loads(line) for line in lines if line.endswith("\n"))
    return [record["step"] for record in records if "reward/mean" in record]


def test_a_run_that_was_stopped_ends_like_the_uninterrupted_one(
    relax: Relax, tiny: Path, tmp_path: Path, whole: Path
) -> None:
    """Its ranks were killed before and came again from memory, and its ledger is gone when it is resumed."""
    run, killed_ranks = tmp_path / "stopped", list[int]()
    shut(run, GATE)

    def went_on_from_memory() -> bool:
        """Kill the actor's rank after its second step, and wait until other ranks have gone on."""
        if not (run / "metrics.jsonl").exists():
            return False
        if not killed_ranks and len(steps(run)) >= 2:
            roles = {role["role"]: role for role in open_run(run).status()["roles"]}
            killed_ranks.append(roles["actor"]["facts"]["ranks"]["actor-rank-0"])
            os.kill(killed_ranks[0], signal.SIGKILL)
        return any(str(record.get("detail", "")).endswith(", from memory") for record in open_run(run).log())

    words = ("train", tiny / "recipe.toml", "run.runner=local", "eval.every=0", *EXACT, *gated(run), "--run-dir", run)
    with_copies = (*words, "checkpoint.micro_every=1", "checkpoint.every=0")
    assert broken_off(with_copies, tmp_path, signal.SIGTERM, went_on_from_memory, lambda: open_gate(run)) == 130
    back = [record["detail"] for record in open_run(run).log() if record.get("event") == "role recovered"]
    restored = [int(detail.split()[-3].rstrip(",")) for detail in back]
    assert len(restored) == 1 and restored[0] >= 1, "one step at most is repeated"
    (run / "ledger.db").unlink()
    resumed = relax("resume", run, "--json")
    assert resumed.code == 0, resumed.err
    copy = rf"{re.escape(str(run))}/ledger\.db is missing: .* the copy of it in .*/checkpoints/step-0000\d\d\n"
    assert re.search(copy, resumed.err)
    assert_ends_like(whole, run, resumed.json)


def test_an_asynchronous_run_goes_on_where_it_was_killed_trains_nothing_twice_and_may_be_extended(
    relax: Relax, tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ("train", tiny / "recipe.toml", *SMALL, "steps=400", "max_staleness=1", "--run-dir", run)
    broken_off(words, tmp_path, signal.SIGKILL, (run / "checkpoints/step-000008/state.json").exists)
    refused = relax("resume", run, "optimizer.lr=1.0", "--json")
    assert refused.code == 2 and "a change of the experiment; only " in refused.json["error"]
    reached = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    again = relax("resume", run, f"steps={reached}", "--json")
    assert again.code == 2 and "which the run has reached; resume with more: steps=N" in again.json["error"]
    missing = relax("resume", run, f"steps={reached + 4}", "--step", "3", "--json")
    assert (
        missing.code == 2
        and f"the run has checkpoints of these steps: {reached - 4}, {reached}" in missing.json["error"]
    )
    (damaged,) = (run / f"checkpoints/step-{reached:06d}/trainer").glob("shard-00001-*.safetensors")
    with damaged.open("r+b") as file:
        file.truncate(1000)
    resumed = relax("resume", run, f"steps={reached + 4}", "--json")
    assert resumed.code == 0, resumed.err
    assert int((run / ".epoch").read_text()) == 2, "refused resumes began nothing"
    assert f"trainer/{damaged.name}: it has 1000 bytes where " in resumed.err
    assert f"going on from step {reached - 4} before it" in resumed.err
    account = resumed.json
    assert account["steps"] == reached + 4 and account["balanced"] and account["max_lag"] <= 1
    assert account["samples_issued"] == (
        account["samples_trained"] + sum(account["samples_dropped"].values()) + account["samples_in_flight"]
    )
    assert account["samples_trained"] == (reached + 4) * 16
    ledger = sqlite3.connect(f"file:{run}/ledger.db?mode=ro", uri=True)
    counted = Counter(ledger.execute("SELECT number, sample FROM ended WHERE reason = ''").fetchall())
    ((folded,),) = ledger.execute("SELECT coalesce(sum(attempts), 0) FROM folded WHERE reason = ''").fetchall()
    ranges = ledger.execute("SELECT first, last FROM folded_groups").fetchall()
    ledger.close()
    assert folded and len(counted) + folded == (reached + 4) * 16 and set(counted.values()) == {1}
    assert not [number for number, _ in counted for first, last in ranges if first <= number <= last]
    assert steps(run) == list(range(1, reached + 5))
    assert f"steps = {reached + 4}" in (run / "config.toml").read_text()

    # Its process was killed between the two renames that bring another export to its place.
    (run / "summary.json").unlink()
    (run / "export").rename(run / ".export.77.old")
    ended = relax("resume", run, "--json")
    assert (ended.code, ended.json["steps"]) == (0, reached + 4), ended.err
    assert (run / "export/config.json").is_file() and not list(run.glob(".export*"))
    over = relax("resume", run, "--json")
    assert over.code == 2 and "which the run has reached; resume with more: steps=N" in over.json["error"]
