# SPDX-License-Identifier: Apache-2.0
"""Scripted sequences of every durable writer, and what must be whole after a crash at any of their points.

`python -m tests.chaos.crash_checks [NAME ...]` runs them; `NAME:N` looks at every N-th point of a sequence only. Nothing else
may run in the process, which is forked for each point.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.modality import ProcessedMedia
from relax_core.api.weights import Version
from relax_core.bus.journal import LedgerJournal
from relax_core.bus.ledger_file import prepare_ledger
from relax_core.control.stages import StageDirectory, resumable_step, stage_directories
from relax_core.media.store import MediaStore
from relax_core.observe.epoch import RunEpoch
from relax_core.observe.run_directory import RunDirectory
from relax_core.roles.checkpoint import choose, complete, discard_partial
from relax_core.tensor_files.whole_folder import finish_replacement
from tests.chaos.crash_points import Crash, attempts_by_step, crashes
from tests.chaos.schedule import LEASE_S, prepared, shortened
from tests.chaos.simulation import Faults, SeededLoop, Start
from tests.chaos.witness import Witness

Promise = Callable[[Any], None]
VARIANT = "stale"
"""Four steps and a checkpoint after each second one."""


def told(crash: Crash, kind: str) -> list[Any]:
    """Return what was promised of this kind, in order."""
    return [what for name, what in crash.promises if name == kind]


# -- a whole run: ledger, checkpoints, epoch ------------------------------------------------------------------------


def whole_run(directory: Path, promise: Promise) -> None:
    """Run the roles of a simulated run; promise what the bus has answered."""
    base = prepared(VARIANT)
    with shortened(base), asyncio.Runner(loop_factory=SeededLoop) as runner:
        runner.run(_whole_run(directory, promise))


async def _whole_run(directory: Path, promise: Promise) -> None:
    base = prepared(VARIANT)
    launch = replace(base.launch, run_dir=str(directory), epoch=RunEpoch.begin(directory))
    witness = Witness(2, False).follow(Version("actor", 0, 0))
    settings = replace(base.bus_settings, lease_s=LEASE_S)
    start = Start(base.catalogue, launch, settings, Version("actor", 0, 0), witness, Faults(), lambda what: None)
    await start.open()
    bus = start.bus
    trained, finalize, admit = bus.trained, bus.finalize, bus.admit

    async def trains(*args: Any) -> Version:
        version = await trained(*args)
        promise(("trained", [version.step, sorted(map(tuple, witness.lineage[version.step]))]))
        return version

    async def finalizes(step: int) -> None:
        promise(("saved", step))
        await finalize(step)

    async def admits(*args: Any) -> Any:
        issues = await admit(*args)
        if issues:
            promise(("admitted", max(issue.group for issue in issues)))
        return issues

    bus.trained, bus.finalize, bus.admit = trains, finalizes, admits  # type: ignore[method-assign]
    error = await start.run()
    await start.close()
    if error is not None or witness.problems:
        raise AssertionError(f"{error} {witness.problems}")


@cache
def reference() -> tuple[dict[int, set[tuple[int, int, int]]], int]:
    """Return the attempts that an undisturbed run trains in each step, and the number of its steps."""
    lineage: dict[int, set[tuple[int, int, int]]] = {}

    def note(what: Any) -> None:
        if what[0] == "trained":
            step, attempts = what[1]
            lineage[step] = set(attempts)

    with tempfile.TemporaryDirectory() as name:
        whole_run(Path(name), note)
    return lineage, len(lineage)


def check_run(directory: Path, crash: Crash) -> None:
    """Resume as production does: at no earlier step than promised, from content and a ledger of exactly that step."""
    lineage, _ = reference()
    saved = max(told(crash, "saved"), default=0)
    if not complete(directory / "checkpoints"):
        assert not saved, f"checkpoint {saved} was whole and is gone"
        return
    resumed, journal = _resume(directory)
    with_step, step = journal.remember(resumed), resumed.step
    journal.close()
    assert step >= saved, f"checkpoint {saved} was whole, and the run goes on from step {step}"
    for at, attempts in attempts_by_step(directory / "ledger.db").items():
        assert at <= step and attempts == lineage[at], f"the ledger has another step {at} than was trained"
    content = json.loads((directory / f"checkpoints/step-{step:06d}/trainer/content.json").read_text())
    for at, found in content.items():
        assert {tuple(one) for one in found} <= lineage[int(at)], f"the weights have another step {at} than the ledger"
    assert with_step.trained == sum(len(lineage[at]) for at in range(1, step + 1))
    assert with_step.issued == with_step.trained + sum(count for _, count in with_step.dropped)
    over = {one[0] for at in range(1, step + 1) for one in lineage[at]}
    pending = {group for group, _, _ in with_step.pending}
    assert not over & pending and over | pending == set(range(with_step.next_group)), "a group is lost, or there twice"
    assert with_step.next_group > max(told(crash, "admitted"), default=-1), "the data cursor went back"


def _resume(directory: Path) -> tuple[Version, LedgerJournal]:
    """Do what `relax resume` does to the files, and open the ledger."""
    point = choose(directory)
    RunEpoch.begin(directory)
    discard_partial(directory)
    resume = point.resume
    ledger = prepare_ledger(directory, Path(resume.directory), resume.step, int(resume.state["incarnation"]))
    point.set_aside()
    return Version("actor", ledger.newest_incarnation + 1, resume.step), LedgerJournal(str(directory))


# -- a resume: the ledger replaced, checkpoints set aside ---------------------------------------------------------------


def damaged_run(directory: Path) -> None:
    """Leave a run whose newest checkpoint and whose ledger are damaged."""
    whole_run(directory, lambda what: None)
    newest = complete(directory / "checkpoints")[-1]
    (newest / "trainer" / "step").write_text("7")
    ledger = directory / "ledger.db"
    ledger.write_bytes(ledger.read_bytes()[:5000])


def resume(directory: Path, promise: Promise) -> None:
    version, journal = _resume(directory)
    journal.remember(version)
    promise(("began", version.incarnation))
    journal.close()


def check_resume(directory: Path, crash: Crash) -> None:
    """Resume once more: from the same step, under an incarnation that nobody was told before."""
    lineage, steps = reference()
    version, journal = _resume(directory)
    remembered = journal.remember(version)
    journal.close()
    assert version.step == steps - 2
    assert remembered.trained == sum(len(lineage[at]) for at in range(1, version.step + 1))
    assert version.incarnation > max(told(crash, "began"), default=0), "an incarnation begins twice"


# -- documents, metrics, transcripts ------------------------------------------------------------------------------------


def documents(directory: Path, promise: Promise) -> None:
    run = RunDirectory.create(directory / "runs" / "one", "one", datetime(2026, 1, 1), random.Random(1))
    run.write_config("steps = 1\n")
    promise(("written", "config"))
    for name, value in (("plugins", 1), ("summary", 1), ("summary", 2)):
        run.write(name, {"value": value})
        promise(("written", [name, value]))
    for step in (1, 2, 3):
        run.append_metrics(step, 0.0, {"reward/mean": float(step)})
        run.append_samples(step, [{"group_id": step}] * 2)
        if step != 2:
            run.sync()
            promise(("synced", step))
    run.close()
    run = RunDirectory.reopen(directory / "runs" / "one")
    promise(("reopened", True))
    run.rewind(2)
    promise(("rewound", True))
    run.close()


def check_documents(directory: Path, crash: Crash) -> None:
    written = told(crash, "written")
    path = directory / "runs" / "one"
    if not (path / "config.toml").is_file():
        assert not written, "the run's directory is gone"
        return
    assert (path / "config.toml").read_text().endswith("steps = 1\n")
    run = RunDirectory.open(path)
    promised = dict(one for one in written if one != "config")
    for name in ("plugins", "summary"):
        found = run.read(name)
        if name == "plugins" or not told(crash, "reopened"):
            ended = len(told(crash, "synced")) == 2  # a summary goes when the run is written on
            assert (found or {"value": 0})["value"] >= (0 if ended and name == "summary" else promised.get(name, 0))
    synced, rewound = max(told(crash, "synced"), default=0), bool(told(crash, "rewound"))
    for found in ([int(line["step"]) for line in run.metrics()], run.sample_steps()):
        assert found == list(range(1, len(found) + 1)), "a record is torn or missing"
        assert len(found) >= (2 if synced == 3 else synced)
        assert not rewound or crash.as_left != directory or len(found) == 2
    for step in range(1, (2 if synced == 3 else synced) + 1):
        assert len(list(run.samples(step))) == 2


# -- stages -------------------------------------------------------------------------------------------------------------


def stages(directory: Path, promise: Promise) -> None:
    config = prepared(VARIANT).config
    for number, name in enumerate(("warm-up", "rl")):
        stage = StageDirectory(number, name, directory / "stages" / f"{number}-{name}")
        stage.write(config)
        promise(("laid", number))
        stage.finish({"steps": 4, "trained": 16})
        promise(("finished", number))


def check_stages(directory: Path, crash: Crash) -> None:
    found = stage_directories(directory)
    for number in told(crash, "laid"):
        assert "relax.config/1" in (found[number].path / "config.toml").read_text()
    for stage in found:
        account = stage.account()
        assert account == {"schema": "relax.stage/1", "name": stage.name, "steps": 4, "trained": 16} or (
            account is None and stage.number not in told(crash, "finished")
        )
    if (done := len(told(crash, "finished"))) == 1 and len(found) == 1:
        assert resumable_step(directory) in (None, 4 * done)


# -- media ----------------------------------------------------------------------------------------------------------------


def media(key: str, value: int) -> ProcessedMedia:
    return ProcessedMedia(key, {"pixels": np.full((64, 64), value, np.float32)}, 3)


def media_store(directory: Path, promise: Promise) -> None:
    store = MediaStore(directory / "media")
    for key, value in (("aa", 1), ("bb", 2), ("aa", 1)):
        store.put(media(key, value))
        promise(("put", key))
    store.set_aside("aa")
    promise(("aside", "aa"))
    store.put(media("aa", 1))
    store.clear_damaged("aa")


def check_media(directory: Path, crash: Crash) -> None:
    """A file that has its name is whole; one that is lost in a power cut with its folder is made again from its source."""
    store = MediaStore(directory / "media")
    if directory == crash.as_left and not told(crash, "aside"):
        assert set(told(crash, "put")) <= set(store.found()) | {"aa" if len(told(crash, "put")) == 3 else ""}
    for key in store.found():
        assert (
            store.get(key).tensors["pixels"].tolist() == media(key, 1 if key == "aa" else 2).tensors["pixels"].tolist()
        )


# -- an export --------------------------------------------------------------------------------------------------------------


def export(directory: Path, promise: Promise) -> None:
    from relax_core.trainer_kit.checkpoint import new_directory

    for number in (1, 2):
        with new_directory(str(directory / "export")) as unfinished:
            for name in ("config.json", "model.safetensors"):
                (unfinished / name).write_text(f"{number} " * 1000)
            (unfinished / "more").mkdir()
            (unfinished / "more" / "tokenizer.json").write_text(f"{number} " * 1000)
        promise(("exported", number))


def check_export(directory: Path, crash: Crash) -> None:
    """After the next start of the run an export is there whole under its name, and nothing half written beside it."""
    numbers = told(crash, "exported")
    target = directory / "export"
    finish_replacement(target)
    assert not list(directory.glob(".export.*"))
    texts = [path.read_text() for path in sorted(target.rglob("*")) if path.is_file()]
    assert len(set(texts)) <= 1 and len(texts) in (0, 3), "an export is torn"
    assert not texts or texts[0].split()[0] in ("1", "2") and len(texts[0].split()) == 1000
    assert texts or not numbers, "an export that was finished is gone"


CHECKS: dict[str, tuple[Any, Any, Any]] = {
    "run": (whole_run, check_run, lambda root: None),
    "resume": (resume, check_resume, damaged_run),
    "documents": (documents, check_documents, lambda root: (root / "runs").mkdir()),
    "stages": (stages, check_stages, lambda root: None),
    "media": (media_store, check_media, lambda root: None),
    "export": (export, check_export, lambda root: None),
}


def check(name: str, every: int = 1) -> tuple[int, list[str]]:
    """Crash a sequence at its points; return how many there were, and what was wrong at which."""
    writers, checked, prepare = CHECKS[name]
    points, wrong = 0, []
    for crash in crashes(writers, prepare, every):
        points += 1
        for kind, directory in (("killed", crash.as_left), ("power cut", crash.after_power_cut)):
            try:
                checked(directory, crash)
            except (
                AssertionError,
                ConfigError,
                InfrastructureError,
                OSError,
                ValueError,
                KeyError,
                IndexError,
            ) as error:
                wrong.append(f"{name}, point {crash.point}, {kind}: {type(error).__name__}: {error}")
    return points, wrong


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos.crash_checks", description=__doc__)
    parser.add_argument(
        "sequences", nargs="*", default=list(CHECKS), metavar="NAME[:N]", help=f"of {', '.join(CHECKS)}"
    )
    chosen = {
        name: int(every or 1) for name, _, every in (word.partition(":") for word in parser.parse_args().sequences)
    }
    if unknown := chosen.keys() - CHECKS:
        parser.error(f"unknown sequences {sorted(unknown)}; known are {', '.join(CHECKS)}")
    reference()
    if "export" in chosen:
        import relax_plugin_torch.checkpoint  # noqa: F401 -- before the forks, which would each import torch
    gc.freeze()  # a collection in a fork would copy every page of the parent
    status = 0
    for name, every in chosen.items():
        points, wrong = check(name, every)
        print(f"{name}: {points} crash points, {len(wrong)} wrong", *wrong[:12], sep="\n  ", flush=True)
        status |= bool(wrong) or not points
    return status


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
