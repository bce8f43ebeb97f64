# SPDX-License-Identifier: Apache-2.0
"""Bad inputs end in one error in words, at every entry point that reads what others wrote; a few through the real command.

The inputs are the first ones of those that `tox -e fuzz` makes. The regressions are inputs that once did worse.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import shares
from tests.fuzz.harness import make_input, refusal_fault, run_target, write_files
from tests.fuzz.targets import TARGETS

SUITE = 1500
COMMANDS = (("plan", "configuration"), ("resume", "documents"), ("data", "lines"))
REGRESSIONS = sorted((Path(__file__).parent / "regressions").iterdir())
EXIT_CODES = {0, 1, 2, 3, 4}


@pytest.mark.parametrize("target", TARGETS)
def test_a_bad_input_is_read_or_refused_in_words(target: str) -> None:
    faults = list(run_target(target, range(shares(list(TARGETS), SUITE)[target])))
    again = "; again: python -m tests.fuzz "
    assert not faults, "\n".join(f"{fault.said}{again}{fault.name}" for fault in faults)


@pytest.mark.parametrize("kept", REGRESSIONS, ids=lambda kept: kept.name)
def test_an_input_that_once_did_worse_is_read_or_refused_in_words(kept: Path, tmp_path: Path) -> None:
    target = TARGETS[kept.name.partition("-")[0]]
    shutil.copytree(kept, tmp_path / "input")
    fault = ""
    try:
        target.feed(tmp_path / "input")
    except target.refusals as error:
        fault = refusal_fault(error)
    assert not fault


@pytest.mark.parametrize(("verb", "target"), COMMANDS)
def test_the_command_ends_bad_inputs_with_one_error_and_its_exit_code(verb: str, target: str, tmp_path: Path) -> None:
    codes = set()
    for number in range(4):
        folder = tmp_path / str(number)
        write_files(folder, make_input(target, number))
        file = next((path for path in folder.iterdir() if path.name == "my.toml" or path.stem == "tasks"), folder)
        words = {"plan": ["plan", file], "resume": ["resume", folder], "data": ["data", "check", file]}[verb]
        done = subprocess.run(
            [sys.executable, "-m", "relax_core", *map(str, words)], capture_output=True, text=True, timeout=600, check=False,
            cwd=folder, errors="replace",
        )  # fmt: skip
        assert done.returncode in EXIT_CODES, done.stderr
        assert "Traceback" not in done.stderr and "this is a fault of relax" not in done.stderr
        codes.add(done.returncode)
    assert 2 in codes or 4 in codes
