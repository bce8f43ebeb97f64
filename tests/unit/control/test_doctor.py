# SPDX-License-Identifier: Apache-2.0
"""The doctor says what is wrong and what to do, and is content with what is well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from relax_core.api.errors import ConfigError
from relax_core.cli.plan import dry_run
from relax_core.control.prepare import plan_run
from relax_core.diagnostics import doctor
from relax_core.diagnostics.doctor import MACHINE, SETUP, findings, probe
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.handshake import PluginState

RECIPE = ["quickstart"]


@pytest.fixture(scope="module", autouse=True)
def _devices_once() -> Iterator[None]:
    """Ask torch for the devices once: its import takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "devices", cache(doctor.devices))
        yield


def named(name: str, *overrides: str) -> list[str]:
    return [found.line for found in findings(RECIPE, overrides) if found.name == name]


def test_this_environment_is_well() -> None:
    catalogue = Catalogue.load()
    found = [doctor.python(), doctor.packages(), doctor.plugins(catalogue), doctor.loopback()]
    assert [one.line for one in found if one.exit_code] == []


def test_requirements_that_are_missing_or_of_another_version_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["no-such-package>=1", "packaging<1", "pluggy>=1", 'no-such-other; extra == "ray"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    missing, other = doctor.unmet("relax-core")
    assert missing == "no-such-package is not installed"
    assert other.startswith("packaging is ") and other.endswith("not <1")
    assert doctor.packages().exit_code == SETUP


def test_a_broken_plugin_is_a_problem_with_its_reason() -> None:
    class Installed:
        records = [replace(Catalogue.load().records[0], state=PluginState.BROKEN, reason="RuntimeError: no licence")]

    found = doctor.plugins(Installed())  # type: ignore[arg-type]
    assert "no licence" in found.detail and found.fix and found.exit_code == SETUP


def test_ray_is_a_problem_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ['ray[serve]>=999; extra == "ray"'])
    needed, spare = doctor.ray(needed=True), doctor.ray(needed=False)
    assert needed.exit_code == SETUP and "--runner local" in needed.fix
    assert spare.exit_code == 0 and "only the runner local" in spare.detail


def test_too_little_room_is_the_machines_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage:
        total, free = 64 << 20, 1 << 20

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage)
    for found in (doctor.disk(tmp_path / "not" / "there"), doctor.shared_memory(tmp_path)):
        assert found.exit_code == MACHINE and found.fix
    assert doctor.shared_memory(tmp_path / "none").exit_code == 0


def test_every_problem_of_a_configuration_has_its_line() -> None:
    lines = named("configuration", "rollout.group_size=1", "max_staleness=0", "batch.updates_per_step=99")
    assert len(lines) == 2
    assert all(line.startswith("problem") for line in lines)
    assert "rollout.group_size" in lines[0] and "batch.updates_per_step" in lines[1]


def interpreter(folder: Path, more: str) -> Path:
    """Make an interpreter like this one, with an option or an environment variable."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n{more.format(python=sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


def starts(*overrides: str) -> dict[str, doctor.StartCheck]:
    """Check whether the quickstart could start, as `relax doctor` and `relax train --dry-run` do."""
    planned = plan_run(RECIPE, overrides)
    (stage,) = planned.stages
    return {one.table: one for one in doctor.check_starts(stage.config, planned.catalogue, stage.plan)}


def test_an_interpreter_without_the_engines_packages_is_a_problem(tmp_path: Path) -> None:
    bare = interpreter(tmp_path, "exec {python} -S")
    found = starts(f'engine.python="{bare}"', f'trainer.python="{bare}"')
    assert found.keys() == {"engine", "trainer"}
    for one in found.values():
        assert "ModuleNotFoundError" in one.wrong and f"{bare} -m pip install" in one.fix


def test_packages_that_are_there_but_cannot_be_imported_and_a_missing_gpu_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text('raise ImportError("libcudart.so.12: cannot open shared object file")\n')
    (tmp_path / "megatron.py").write_text('raise RuntimeError("built for another torch")\n')
    broken = interpreter(tmp_path, f"PYTHONPATH={tmp_path} exec {{python}}")
    monkeypatch.setattr(doctor, "has_gpus", lambda: False)
    gpus = ("run.runner=local", "placement.rollout.gpus_per_engine=1")
    found = starts("engine=vllm", f'engine.python="{broken}"', "trainer=megatron", f'trainer.python="{broken}"', *gpus)
    assert "ImportError: libcudart.so.12" in found["engine"].wrong and found["engine"].fix
    assert "built for another torch" in found["trainer"].wrong
    assert (found["placement"].what, found["placement"].wrong) == ("gpu:0", "this machine has no GPU")


def test_the_dry_run_imports_before_it_prints_the_graph(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    wrong = doctor.StartCheck("engine", "vllm under /python", "no GPU", "use auto")
    monkeypatch.setattr(doctor, "check_starts", lambda *_: iter([doctor.StartCheck("trainer", "torch"), wrong]))
    with pytest.raises(ConfigError, match="engine: got vllm under /python: no GPU; use auto"):
        dry_run(RECIPE, [])
    captured = capsys.readouterr()
    assert captured.out == "" and "importing the engine and the trainer" in captured.err


def test_a_failed_probe_shows_its_last_line_of_output() -> None:
    assert probe(sys.executable, "print('fine')") == ("fine", "")
    assert probe(sys.executable, "raise SystemExit('torn')") == ("", "torn")
    assert probe("/no/such/python", "")[1].startswith("FileNotFoundError")
