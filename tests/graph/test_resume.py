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
from typing import Any

from relax_core.views.run import open_run
from tests.graph.conftest import Relax, command, environment, survivors
from tests.graph.gated import gated, open_gate, shut

SMALL = ("run.runner=local", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.every=0", "checkpoint.every=4")
STEPS = 16
EXACT = (*SMALL, f"steps={STEPS}", "deterministic=true", "max_staleness=0", "placement=colocate", "checkpoint.keep=99")
SAME = ("reward/mean", "train/loss", "train/grad_norm", "tokens/trained", "lag/max")
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


def rows(run: Path) -> list[tuple[Any, ...]]:
    records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], *(record[key] for key in SAME)) for record in records if "reward/mean" in record]


def trained(run: Path) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """Transcripts by attempt."""
    view = open_run(run)
    samples = [sample for step in range(1, STEPS + 1) for sample in view.samples(step)]
    return {(s["group_id"], s["sample_index"], s["step"]): (s["prompt"], s["response"], s["reward"]) for s in samples}


def test_runs_that_were_stopped_or_killed_end_like_the_uninterrupted_one(
    relax: Relax, tiny: Path, tmp_path: Path
) -> None:
    whole, stopped, killed, killed_ranks = tmp_path / "whole", tmp_path / "stopped", tmp_path / "killed", list[int]()

    def words(run: Path) -> tuple[str | Path, ...]:
        return "train", tiny / "recipe.toml", *EXACT, *gated(run), "--run-dir", run

    assert relax(*words(whole)).code == 0
    shut(stopped, GATE)
    shut(killed, GATE)

    def went_on_from_memory() -> bool:
        """Kill the actor's rank in its third step, and wait until other ranks have gone on."""
        if not (stopped / "metrics.jsonl").exists():
            return False
        if not killed_ranks and any(step >= 2 for step, *_ in rows(stopped)):
            roles = {role["role"]: role for role in open_run(stopped).status()["roles"]}
            killed_ranks.append(roles["actor"]["facts"]["ranks"]["actor-rank-0"])
            os.kill(killed_ranks[0], signal.SIGKILL)
        return any(str(record.get("detail", "")).endswith(", from memory") for record in open_run(stopped).log())

    with_copies = (*words(stopped), "checkpoint.micro_every=1")
    assert broken_off(with_copies, tmp_path, signal.SIGTERM, went_on_from_memory, lambda: open_gate(stopped)) == 130
    back = [record["detail"] for record in open_run(stopped).log() if record.get("event") == "role recovered"]
    assert len(back) == 1 and int(back[0].split()[-3].rstrip(",")) >= 1, "one step at most is repeated"
    code = broken_off(words(killed), tmp_path, signal.SIGKILL, (killed / "checkpoints/step-000008/state.json").exists)
    open_gate(killed)
    assert code == -signal.SIGKILL
    assert "lost" in relax("status", killed).out
    left = [path.name for path in Path("/dev/shm").glob("relax-killed-*")]
    (stopped / "ledger.db").unlink()
    (killed / "ledger.db").write_bytes(b"what a failing disk made of it" * 1000)
    (killed / "ledger.db-wal").unlink()  # else sqlite finds every page of so young a ledger there
    for run, fault in ((stopped, "is missing"), (killed, "is corrupted (file is not a database)")):
        resumed = relax("resume", run, "--json")
        assert resumed.code == 0, resumed.err
        copy = (
            rf"{re.escape(str(run))}/ledger\.db {re.escape(fault)}: .* the copy of it in .*/checkpoints/step-0000\d\d\n"
        )
        assert re.search(copy, resumed.err)
        assert (
            resumed.json["steps"] == STEPS
            and resumed.json["balanced"]
            and resumed.json["samples_trained"] == STEPS * 16
        )
        assert (run / "export/model.safetensors").read_bytes() == (whole / "export/model.safetensors").read_bytes()
        assert rows(run) == rows(whole)
        assert trained(run) == trained(whole)
    assert [step for step, *_ in rows(whole)] == list(range(1, STEPS + 1))
    # Any run that starts sweeps what dead ones left: maybe this one, maybe a neighbour before it was looked at.
    assert not [name for name in left if (Path("/dev/shm") / name).exists()]


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
    assert [step for step, *_ in rows(run)] == list(range(1, reached + 5))
    assert f"steps = {reached + 4}" in (run / "config.toml").read_text()

    # Its process was killed between the two renames that bring another export to its place.
    (run / "summary.json").unlink()
    (run / "export").rename(run / ".export.77.old")
    ended = relax("resume", run, "--json")
    assert (ended.code, ended.json["steps"]) == (0, reached + 4), ended.err
    assert (run / "export/config.json").is_file() and not list(run.glob(".export*"))
    over = relax("resume", run, "--json")
    assert over.code == 2 and "which the run has reached; resume with more: steps=N" in over.json["error"]
