# SPDX-License-Identifier: Apache-2.0
"""The style measure refuses what it says it refuses, and lets good code pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.style.house import style_module

MEASURE = Path(__file__).parents[2] / ".ci" / "style.py"
HEAD = '# SPDX-License-Identifier: Apache-2.0\n"""A module."""\n'


def measure(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, MEASURE, folder], capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


FAULTS = {
    "licence": ('"""A module."""\n', "the first line is not"),
    "docstring": ("# SPDX-License-Identifier: Apache-2.0\nx = 1\n", "no module docstring"),
    "pronoun": ('# SPDX-License-Identifier: Apache-2.0\n"""What it holds."""\n', "contains 'What'"),
    "argument": (HEAD + "def work(given) -> None:\n    pass\n", "no annotation of given"),
    "result": (HEAD + "class A:\n    def work(self, *, key: int):\n        pass\n", "no annotation of the result"),
    "noun": (HEAD + 'class B:\n    """Whose turn it is."""\n', "py:3: 'Whose turn it is.' contains 'Whose'"),
    "verb": (HEAD + 'def work() -> None:\n    """To be done."""\n', "contains 'To'"),
    "value": (HEAD + 'WAIT_S = 1\n"""Until nobody waits."""\n', "py:4: 'Until nobody waits.' contains 'nobody'"),
    "error": (HEAD + 'raise ValueError(f"{1}: whatever it is")\n', "py:3: '{}: whatever it is' contains 'whatever'"),
}


def test_each_fault_is_named_with_its_place_and_good_code_is_not(tmp_path: Path) -> None:
    for name, (code, _) in FAULTS.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "good.py").write_text(HEAD + 'def work(given: int, *more: str) -> None:\n    """Do the work."""\n')
    status, said = measure(tmp_path)
    assert status == 1
    assert "good.py" not in said
    for name, (_, complaint) in FAULTS.items():
        assert any(f"{name}.py" in line and complaint in line for line in said.splitlines()), name


def test_a_class_name_that_exists_twice_is_named_with_both_places(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(HEAD + 'class Lease:\n    """A lease."""\n')
    status, said = measure(tmp_path)
    assert status == 1
    assert "class Lease exists 2 times" in said
    assert "one.py:3" in said and "other.py:3" in said


def test_results_that_say_nothing_are_counted(tmp_path: Path) -> None:
    opaque = ("Any", "list[dict[str, Any]]", "tuple[int, int, int, int]", "dict[str, tuple[int, str, int, str]]")
    clear = ("object", "tuple[int, ...]", "tuple[int, int, int]", "Company")
    functions = (f"def f{number}() -> {result}: ...\n" for number, result in enumerate((*opaque, *clear)))
    (tmp_path / "results.py").write_text(HEAD + "".join(functions))
    code, said = measure(tmp_path)
    assert code == 0
    assert said.splitlines()[1].split()[-1] == str(len(opaque))


def test_a_measure_above_its_limit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = tmp_path / "house.toml"
    limits.write_text('[files]\nwhat = "files"\nmost = 3\ntarget = 2\n[lines]\nwhat = "lines"\nmost = 9\ntarget = 5\n')
    above = style_module().above_limit
    assert list(above({"files": 4, "lines": 9}, limits)) == ["files: 4, above 3 in house.toml: files"]
    assert not list(above({"files": 3, "lines": 8}, limits))
    assert capsys.readouterr().out == "lines: 8 of 9; house.toml may have the lower value (target 5)\n"


def test_private_functions_that_are_used_once_are_counted(tmp_path: Path) -> None:
    body = "def _once() -> int:\n    return 1\n\n\ndef _twice() -> int:\n    return _once() + 1\n\n\nX = _twice() + _twice()\n"
    (tmp_path / "noun.py").write_text(HEAD + body)
    code, said = measure(tmp_path)
    assert code == 0
    assert said.splitlines()[1].split()[-2] == "1"
