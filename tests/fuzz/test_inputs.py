# SPDX-License-Identifier: Apache-2.0
"""Bad inputs end in one error in words, at every entry point that reads files, messages or bytes of strangers.

The inputs are the first 100 of the 2,000 that `tox -e faults -- bad-inputs` makes, and the regressions: inputs that once
ended in a crash, a hang or an error without words.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.__main__ import shares
from tests.fuzz.harness import make_input, refusal_fault, run_target, write_files
from tests.fuzz.targets import TARGETS
from tests.graph.conftest import Ran, Relax, command, environment, relax_here

__all__ = ["relax_here"]

SUITE = 100
COMMANDS = (("plan", "configuration"), ("resume", "documents"), ("data", "lines"))
REGRESSIONS = sorted((Path(__file__).parent / "regressions").iterdir())
REFUSED = {2, 4}
"""Exit codes of a faulty configuration and of damaged files."""
EXIT_CODES = {0, 1, 3, *REFUSED}
REFUSED_CONFIGURATION = 0
"""Number of an input whose configuration is refused."""


@pytest.mark.process
@pytest.mark.parametrize("target", TARGETS)
def test_a_bad_input_is_read_or_refused_in_words(target: str) -> None:
    faults = list(run_target(target, range(shares(list(TARGETS), SUITE)[target])))
    again = "; again: python -m tests.fuzz "
    assert not faults, "\n".join(f"{fault.said}{again}{fault.name}" for fault in faults)


@pytest.mark.parametrize("kept", REGRESSIONS, ids=lambda kept: kept.name)
def test_an_input_that_once_did_worse_is_read_or_refused_in_words(kept: Path, tmp_path: Path) -> None:
    target = TARGETS[kept.name.partition("-")[0]]
    write_files(tmp_path / "input", target.sound())
    shutil.copytree(kept, tmp_path / "input", dirs_exist_ok=True)
    fault = ""
    try:
        target.feed(tmp_path / "input")
    except target.refusals as error:
        fault = refusal_fault(error)
    assert not fault


@pytest.mark.parametrize(("verb", "target"), COMMANDS)
def test_the_command_ends_bad_inputs_with_one_error_and_its_exit_code(
    verb: str, target: str, relax_here: Relax, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = set()
    for number in range(4):
        folder, words = bad_command(verb, target, number, tmp_path)
        monkeypatch.chdir(folder)
        ran = relax_here(*words)
        check_end(ran)
        codes.add(ran.code)
    assert codes & REFUSED


@pytest.mark.process
def test_a_process_ends_a_bad_input_as_the_command_in_this_process_does(relax_here: Relax, tmp_path: Path) -> None:
    folder, words = bad_command(*COMMANDS[0], REFUSED_CONFIGURATION, tmp_path)
    done = subprocess.run(
        command(*words), cwd=folder, env=environment(), capture_output=True, errors="replace", timeout=600, check=False,
    )  # fmt: skip
    check_end(Ran(done.returncode, done.stdout, done.stderr))
    assert (here := relax_here(*words)).code == done.returncode in REFUSED
    assert here.err and done.stderr.endswith(here.err)  # a process that takes five seconds also says what it does


def bad_command(verb: str, target: str, number: int, place: Path) -> tuple[Path, list[str | Path]]:
    """Write an input to a folder of its own; return the folder and the words that have `relax` read the input."""
    folder = place / str(number)
    write_files(folder, make_input(target, number))
    file = next((path for path in folder.iterdir() if path.name == "my.toml" or path.stem == "tasks"), folder)
    words: dict[str, list[str | Path]] = {
        "plan": ["plan", file],
        "resume": ["resume", folder],
        "data": ["data", "check", file],
    }
    return folder, words[verb]


def check_end(ran: Ran) -> None:
    assert ran.code in EXIT_CODES, ran.err
    assert "Traceback" not in ran.err and "this is a fault of relax" not in ran.err
