# SPDX-License-Identifier: Apache-2.0
"""Published weights in memory go with their owner, and only with their owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from relax_core.tensor_files.mapped_files import OWNER, claim, sweep_abandoned

CLAIM = "import sys; from pathlib import Path; from relax_core.tensor_files.mapped_files import claim; claim(Path(sys.argv[1]))"


def test_folders_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CLAIM, str(tmp_path / "relax-dead")], check=True)
    (tmp_path / "relax-dead" / "actor@0.1.safetensors").write_bytes(b"weights")
    claim(tmp_path / "relax-living")
    assert sweep_abandoned(tmp_path) == ["relax-dead"]
    assert [path.name for path in tmp_path.iterdir()] == ["relax-living"]


def test_a_claim_of_what_another_living_process_owns_changes_nothing(tmp_path: Path) -> None:
    claim(tmp_path / "relax-run")
    mark = (tmp_path / "relax-run" / OWNER).read_text()
    subprocess.run([sys.executable, "-c", CLAIM, str(tmp_path / "relax-run")], check=True)
    assert (tmp_path / "relax-run" / OWNER).read_text() == mark


def test_a_reused_process_number_is_not_the_owner(tmp_path: Path) -> None:
    claim(tmp_path / "relax-run")
    mark = json.loads((tmp_path / "relax-run" / OWNER).read_text())
    (tmp_path / "relax-run" / OWNER).write_text(json.dumps({**mark, "began": mark["began"] - 3600}))
    assert sweep_abandoned(tmp_path) == ["relax-run"]


def test_a_folder_with_a_possible_successor_stays_for_a_while_after_its_last_change(tmp_path: Path) -> None:
    folder = tmp_path / "relax-bus"
    claim(folder, successor_s=3600.0)
    mark = json.loads((folder / OWNER).read_text())
    (folder / OWNER).write_text(json.dumps({**mark, "began": mark["began"] - 3600}))
    assert sweep_abandoned(tmp_path) == []
    os.utime(folder, (0.0, mark["began"] - 7200))
    assert sweep_abandoned(tmp_path) == ["relax-bus"]


def test_folders_without_a_mark_of_this_container_are_kept(tmp_path: Path) -> None:
    (tmp_path / "relax-unmarked").mkdir()
    (tmp_path / "relax-broken").mkdir()
    (tmp_path / "relax-broken" / OWNER).write_text("{")
    (tmp_path / "relax-elsewhere").mkdir()
    (tmp_path / "relax-elsewhere" / OWNER).write_text('{"pid": 999999999, "began": 0, "processes": "pid:[1]"}')
    assert sweep_abandoned(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
