# SPDX-License-Identifier: Apache-2.0
"""The measure of the house finds circles of imports, and the types that hold workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.style.house import circles, worker_types

MODULES = {
    "__init__": "from measured_house import first",
    "first": "from measured_house import second",
    "second": "def work():\n    import measured_house.third",
    "third": "import measured_house.first",
    "lone": "import measured_house.first",
}


def test_modules_that_import_each_other_are_one_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measured_house").mkdir()
    for name, code in MODULES.items():
        (tmp_path / f"measured_house/{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert circles(["measured_house"]) == [[f"measured_house.{name}" for name in ("first", "second", "third")]]


def test_a_type_holds_workers_if_an_annotation_names_them(tmp_path: Path) -> None:
    file = tmp_path / "pool.py"
    file.write_text("class Pool:\n    def __init__(self, workers: Workers) -> None: ...\nclass Spec:\n    name: str\n")
    assert list(worker_types([file])) == ["Pool"]
