# SPDX-License-Identifier: Apache-2.0
"""`export.every` writes the model of a step as a folder, keeps the newest few, and deletes those of undone steps."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relax_core.api.events import ExportSaved
from relax_core.roles.exports import Exports
from tests.unit.roles.simulated_run import SimulatedRun, SimulatedWorker
from tests.unit.roles.test_recovery import before_each_rank_call, dies_in


def exports_of(run: Path) -> dict[str, str]:
    """Return the content of each export, by the name of its folder."""
    return {path.name: (path / "config.json").read_text() for path in sorted((run / "exports").iterdir())}


def test_every_n_steps_the_present_model_is_exported_and_the_newest_few_are_kept(tmp_path: Path) -> None:
    outcome = SimulatedRun(tmp_path, steps=8, export={"every": 2, "keep": 2}, placement="colocate").run()
    told = [(event.step, Path(event.path).name, event.final) for event in outcome.told(ExportSaved)]
    regular = [(step, f"step-00000{step}", False) for step in (2, 4, 6)]
    assert told == [*regular, (8, "export", True)]
    assert exports_of(tmp_path) == {"step-000004": "4", "step-000006": "6"}
    assert (tmp_path / "export/config.json").read_text() == "8"


def test_without_the_option_only_the_final_model_is_exported(tmp_path: Path) -> None:
    SimulatedRun(tmp_path, steps=2).run()
    assert not (tmp_path / "exports").exists() and (tmp_path / "export/config.json").read_text() == "2"


def test_a_rollback_deletes_the_exports_of_the_steps_that_it_undoes(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    async def look(simulation: SimulatedRun, worker: SimulatedWorker, method: str) -> None:
        if method == "load":
            seen.append(sorted(exports_of(tmp_path)))

    settings: dict[str, Any] = {"checkpoint": {"every": 2}, "export": {"every": 1, "keep": 9}}
    run = SimulatedRun(tmp_path, steps=6, **settings)
    outcome = run.run(dies_in("accumulate", "load", after=5), before_each_rank_call(look))
    assert outcome.account.balanced
    assert seen and all(names == [f"step-00000{step}" for step in (1, 2, 3, 4)] for names in seen)
    assert exports_of(tmp_path) == {f"step-00000{step}": str(step) for step in range(1, 6)}


def test_a_step_that_a_guard_suspects_is_not_exported(tmp_path: Path) -> None:
    trainer = {"name": "scripted-trainer", "explodes": [4]}
    guards = {"grad_norm": {"action": "stop", "limit": 10.0, "steps": 2}}
    SimulatedRun(tmp_path, steps=8, trainer=trainer, guards=guards, export={"every": 2, "keep": 9}).run()
    assert sorted(exports_of(tmp_path)) == ["step-000002", "step-000005", "step-000006"]


def test_what_a_killed_process_left_is_no_export_and_is_deleted(tmp_path: Path) -> None:
    for name in ("step-000002", "step-000004", ".step-000006.17.tmp", "step-mine"):
        (tmp_path / "exports" / name).mkdir(parents=True)
        (tmp_path / "exports" / name / "model.safetensors").touch()
    (tmp_path / "exports/step-000002/config.json").touch()
    context: Any = SimpleNamespace(run_dir=str(tmp_path), changing_files=nullcontext)
    exports = Exports(context, trainer=SimpleNamespace())  # type: ignore[arg-type]
    assert [path.name for path in exports.written()] == ["step-000002"]
    exports.undo(4)
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["step-000002", "step-mine"]
