# SPDX-License-Identifier: Apache-2.0
"""Engines, trainers and placements that can't start are reported before a run, with the fix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relax_core.api.errors import ConfigError
from relax_core.cli.graph import dry_run
from relax_core.control import dry_run as checks, start_check
from relax_core.control.prepare import plan_run
from relax_core.control.start_check import StartCheck, check_starts, probe

RECIPE = ["quickstart"]


def interpreter(folder: Path, more: str) -> Path:
    """Make an interpreter like this one, with an option or an environment variable."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n{more.format(python=sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


def starts(*overrides: str) -> dict[str, StartCheck]:
    """Check whether the quickstart could start, as `relax train --dry-run` does."""
    planned = plan_run(RECIPE, overrides)
    (stage,) = planned.stages
    return {one.table: one for one in check_starts(stage.config, planned.catalogue, stage.plan)}


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
    monkeypatch.setattr(start_check, "has_gpus", lambda: False)
    gpus = ("run.runner=local", "placement.rollout.gpus_per_engine=1")
    found = starts("engine=vllm", f'engine.python="{broken}"', "trainer=megatron", f'trainer.python="{broken}"', *gpus)
    assert "ImportError: libcudart.so.12" in found["engine"].wrong and found["engine"].fix
    assert "built for another torch" in found["trainer"].wrong
    assert (found["placement"].what, found["placement"].wrong) == ("gpu:0", "this machine has no GPU")


def test_the_dry_run_imports_before_it_prints_the_graph(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    wrong = StartCheck("engine", "vllm under /python", "no GPU", "use auto")
    monkeypatch.setattr(checks, "check_starts", lambda *_: iter([StartCheck("trainer", "torch"), wrong]))
    with pytest.raises(ConfigError, match="engine: got vllm under /python: no GPU; use auto"):
        dry_run(RECIPE, [])
    captured = capsys.readouterr()
    assert captured.out == "" and "importing the engine and the trainer" in captured.err


def test_a_failed_probe_shows_its_last_line_of_output() -> None:
    assert probe(sys.executable, "print('fine')") == ("fine", "")
    assert probe(sys.executable, "raise SystemExit('torn')") == ("", "torn")
    assert probe("/no/such/python", "")[1].startswith("FileNotFoundError")
