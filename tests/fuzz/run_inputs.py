# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, ledgers and documents of a run directory: what `relax resume`, `status`, `why` and `report` read."""

from __future__ import annotations

import io
import json
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import zstandard
from relax_plugin_report.commands import report
from relax_plugin_workbench.models import compare

from relax_core.api.errors import RelaxError
from relax_core.api.weights import Version
from relax_core.bus.journal import (
    CheckpointRecord,
    EndedRecord,
    FinalRecord,
    IssuedRecord,
    LedgerJournal,
    NoteRecord,
    RegisteredRecord,
    StepRecord,
    TrainedRecord,
)
from relax_core.bus.ledger_file import prepare_ledger
from relax_core.cli import runs
from relax_core.control.prepare import prepare_resume
from relax_core.control.stages import resumable_step
from relax_core.observe.epoch import RunEpoch
from relax_core.roles.checkpoint import choose
from relax_core.roles.checkpoint_files import checksums, write_list
from relax_core.views.run import list_runs, open_run
from tests.fuzz.configuration_inputs import Files, _spoiled, model_files, recipes, toml_bytes
from tests.fuzz.mutations import json_bytes, mutate_bytes
from tests.fuzz.task_inputs import _one_line


@cache
def run_files() -> Files:
    """A run directory with two checkpoints, and what else a run writes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        journal = LedgerJournal(folder)
        for step in range(1, 5):
            ended = [EndedRecord((step - 1, sample, 0), "", step, step - 1, True) for sample in (0, 1)]  # type: ignore[arg-type]
            journal.add([IssuedRecord(step - 1, 0, 0, 2), TrainedRecord(step - 1, step), *ended, StepRecord(step, 0)])
            journal.add([NoteRecord("rollout", step, '{"cursor": 1}'), RegisteredRecord("actor", 0)])
            journal.commit()
            if step % 2 == 0:
                journal.add([CheckpointRecord(step, 0)])
                journal.commit()
                own = run / f"checkpoints/step-{step:06d}"
                journal.copy(str(own))
                (own / "trainer").mkdir()
                (own / "trainer/rank-0.safetensors").write_bytes(model_files()["model/model.safetensors"])
                (own / "state.json").write_text(
                    json.dumps({"schema": 1, "step": step, "incarnation": 0, "listed": True})
                )
                write_list(own, checksums(own))
                journal.add([FinalRecord(step)])
                journal.commit()
        journal.close()
        for left in ("ledger.db-wal", "ledger.db-shm"):
            (run / left).unlink(missing_ok=True)
        return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def checkpoint_input(random: Random) -> Files:
    files = {name: body for name, body in run_files().items() if name.startswith("checkpoints/")}
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice(sorted(files))
        choice = random.random()
        if choice < 0.15 and len(files) > 1:
            del files[name]
        elif choice < 0.3:
            strange = ("x", "", "000003", "٣", "-1")
            other = random.choice([*(f"checkpoints/step-{one}/state.json" for one in strange), f"{name}/x"])
            if not any(known.startswith(f"{other}/") or other.startswith(f"{known}/") for known in files):
                files[other] = files[name]
        else:
            files[name] = _spoiled(name, files[name], random)
    return files


def feed_checkpoints(folder: Path) -> None:
    resumable_step(folder)
    choose(folder)


def ledger_input(random: Random) -> Files:
    files = dict(run_files())
    copies = [name for name in files if name.endswith("ledger.db")]
    for name in {"ledger.db", *(random.sample(copies, 1) if random.random() < 0.5 else [])}:
        files[name] = (mutate_bytes if random.random() < 0.4 else _strange_rows)(files[name], random)
    if random.random() < 0.1:
        files["ledger.db-wal"] = random.randbytes(200)
    return files


def _strange_rows(body: bytes, random: Random) -> bytes:
    """Change what a ledger holds by SQL."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.deserialize(body[:18] + b"\x01\x01" + body[20:])  # memory has no write-ahead log
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(random.choice((1, 1, 2))):
            table = random.choice(names)
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            column = random.choice(columns or ["c"])
            value = random.choice((None, -1, 0, 2**62, 1.5, "x", "", b"\xff\xfe", "\x1b[0m", 10**9, "NaN"))
            statement = random.choice((
                f"UPDATE {table} SET {column} = ?1", f"UPDATE {table} SET {column} = ?1 WHERE rowid % 2 = 0 OR ?1 IS NULL",
                f"DELETE FROM {table} WHERE ?1 IS ?1", f"DROP TABLE {table}",
                f"ALTER TABLE {table} RENAME COLUMN {column} TO c",
                f"ALTER TABLE {table} RENAME TO strange", f"INSERT INTO {table} VALUES ({', '.join('?1' for _ in columns)})",
            ))  # fmt: skip
            try:
                db.execute(statement, (value,) if "?1" in statement else ())
            except sqlite3.Error:
                continue
        return bytes(db.serialize())


def feed_ledger(folder: Path) -> None:
    """Prepare the ledger for the newest checkpoint, take it over, go on and copy it, as a resumed run does."""
    prepare_ledger(folder, folder / "checkpoints/step-000004", 4, 0)
    journal = LedgerJournal(str(folder))
    try:
        known = journal.remember(Version("actor", 1, 4))
        assert known.next_group >= 0
        journal.add([StepRecord(5, 1), CheckpointRecord(5, 1), FinalRecord(5)])
        journal.commit()
        journal.copy(str(folder / "copy"))
    finally:
        journal.close()


WAIT = {"role": "actor", "reason": "rows", "blocked_by": "rollout", "since": 1.0, "deadline": 9.0}
DOCUMENTS: dict[str, Any] = {
    "summary.json": {"schema": "relax.summary/1", "status": "finished", "steps": 4, "wall_seconds": 3.5, "reward_first": 0.1,
        "reward_last": 0.5, "eval_last": {"set": "held-out", "mean": 0.5, "n": 8, "temperature": 1.0}, "samples_issued": 8,
        "samples_trained": 6, "samples_dropped": {"stale": 2}, "samples_in_flight": 0, "max_lag": 1, "restarts": {"actor": 1},
        "tokens_generated": 100, "tokens_per_second": 10.0, "weight_publishes": 4, "balanced": True,
        "length_histogram": {"trained": [1, 2], "dropped": {"stale": [1]}}},
    "status.json": {"schema": "relax.status/1", "state": "running", "step": 2, "steps": 4, "run_id": "r-1", "written_at": 5.0,
        "now": 4.0, "pid": 1, "host": "abc", "roles": [
            {"role": "actor", "state": "waiting", "doing": "", "registration": 0, "at": 3.0, "waits": [WAIT], "facts": {}},
            {"role": "rollout", "state": "working", "doing": "sampling", "registration": 0, "at": 3.0, "waits": [],
             "facts": {"engines": {"e0": {"state": "serving", "requests": 2, "silent_s": 1.0, "loading": False}},
                       "under_way": [{"group": 1, "at": "engines", "for_s": 2.0, "missing": 1}]}}]},
    "plugins.json": {"schema": "relax.plugins/1", "plugins": [{"name": "relax-core", "version": "0.1", "content": "ab"}]},
    "provenance.json": {"schema": "relax.provenance/1", "git": {"commit": "ab", "dirty": False}, "packages": {"torch": "2"},
        "command": ["relax", "train"], "machine": {"cpus": 2}},
    "stages/0-warm/stage.json": {"schema": "relax.stage/1", "name": "warm", "steps": 4, "issued": 8},
}  # fmt: skip
METRICS = [
    {"schema": "relax.metrics/1", "step": step, "time": 1.0 + step, "elapsed_s": 1.0, "reward/mean": 0.1 * step,
     "eval/held-out/mean": 0.5, "lag/max": 1.0, "time/step_s": 2.0, "length/mean": 3.0, "samples/dropped/stale": 1.0,
     "train/rollout_log_prob_diff_lag0": 0.5, "lag/samples/0": 3, "wait/actor/rows_s": 1.0}
    for step in (1, 2, 3)
]  # fmt: skip
SAMPLE = {
    "schema": "relax.sample/1", "step": 1, "group_id": 0, "sample_index": 0, "outcome": "finished", "reward": 1.0,
    "prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "key": "ab"}]}],
    "response": "b", "rewards": {"exact": 1.0}, "turns": [{"role": "assistant", "content": "x"}], "media": [{"kind": "image"}],
}  # fmt: skip


EVALUATIONS = [
    {"schema": "relax.evaluation/1", "step": step, "set": "held-out", "temperature": 1.0, "tasks": {"0a": [1.0], "0b": []}}
    for step in (0, 2)
]  # fmt: skip


def sound_documents() -> Files:
    """Return the configuration and the records of a run."""
    metrics = b"\n".join(json.dumps(line).encode() for line in METRICS)
    evaluations = b"\n".join(json.dumps(line).encode() for line in EVALUATIONS)
    return {"config.toml": toml_bytes(recipes()[0]), "metrics.jsonl": metrics, "evaluations.jsonl": evaluations}


def documents_input(random: Random) -> Files:
    files = {name: json.dumps(tree).encode() for name, tree in DOCUMENTS.items()
             if random.random() < (0.2 if "/" in name else 0.8)}  # fmt: skip
    if random.random() < 0.3:
        files |= run_files()
    if random.random() < 0.5:
        files.pop("summary.json", None)
    files |= sound_documents()
    samples = b"\n".join(json_bytes(SAMPLE, random) for _ in range(2))
    files["samples/step-000001.jsonl.zst"] = zstandard.ZstdCompressor(write_checksum=True).compress(samples)
    files[".epoch"] = b"000000000001"
    record = {
        "time": "2026-01-01",
        "level": "info",
        "event": "role recovered",
        "role": "actor",
        "seconds": 1.0,
        "detail": "",
    }
    files["events.jsonl"] = json_bytes(record, random) if random.random() < 0.2 else json.dumps(record).encode()
    for name in random.sample(sorted(files), random.choice((1, 1, 2, 3))):
        if name in DOCUMENTS:
            files[name] = json_bytes(DOCUMENTS[name], random)
        elif name == "metrics.jsonl":
            files[name] = b"\n".join(json_bytes(line, random) for line in METRICS)
        elif name == "evaluations.jsonl":
            files[name] = b"\n".join(json_bytes(line, random) for line in EVALUATIONS)
        elif name.endswith(".zst") and random.random() < 0.2:  # little that unpacks to much
            files[name] = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 27))
        else:
            files[name] = mutate_bytes(files[name], random)
    return files


def feed_documents(folder: Path) -> None:
    """Read the run as `relax status`, `why`, `report` and `compare` do, and begin its next start as `relax resume` does."""
    later: list[RelaxError] = []

    def tried(work: Callable[[], Any]) -> None:
        try:
            work()
        except RelaxError as error:
            later.append(error)

    with redirect_stdout(io.StringIO()):
        tried(lambda: list_runs(10.0, folder.parent))
        tried(lambda: runs.status(str(folder)))
        tried(lambda: runs.why(str(folder), json=True))
        tried(lambda: report(str(folder)))
        tried(lambda: compare(str(folder), json=True))
        tried(lambda: compare(str(folder)))
        tried(lambda: open_run(folder).config)
        tried(lambda: resumable_step(folder))
        tried(lambda: RunEpoch.begin(folder))
        tried(lambda: prepare_resume(folder, ()))
    for error in later[1:]:
        for one in getattr(error, "errors", (error,)):
            _one_line(one)
    if later:
        raise later[0]
