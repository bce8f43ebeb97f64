# SPDX-License-Identifier: Apache-2.0
"""The fence around a run's files: processes of an earlier start change nothing once a later one has begun."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relax_core.api.errors import InfrastructureError
from relax_core.observe import epoch
from relax_core.observe.epoch import RunEpoch

HOLDER = """
import sys
from pathlib import Path
from relax_core.observe.epoch import RunEpoch
with RunEpoch(sys.argv[1], 1).hold():
    print("held", flush=True)
    sys.stdin.read()
    Path(sys.argv[2]).write_text("whole")
"""


def test_an_earlier_start_cannot_change_files(tmp_path: Path) -> None:
    first = RunEpoch.begin(tmp_path)
    with first.hold():
        pass
    second = RunEpoch.begin(tmp_path)
    with (
        pytest.raises(InfrastructureError, match=r"started again \(start 2\); this process belongs to start 1"),
        first.hold(),
    ):
        raise AssertionError("an earlier start got in")
    with second.hold():
        pass


def test_an_error_while_files_change_stays_what_it_is_and_frees_the_epoch(tmp_path: Path) -> None:
    first = RunEpoch.begin(tmp_path)
    with pytest.raises(ValueError, match="torn"), first.hold():
        raise ValueError("torn")
    assert RunEpoch.begin(tmp_path).number == 2


def test_a_start_waits_for_a_change_that_is_under_way_in_another_process(tmp_path: Path) -> None:
    first, changed = RunEpoch.begin(tmp_path), tmp_path / "changed"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, first.file, str(changed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        begun: list[str] = []
        start = threading.Thread(
            target=lambda: begun.append(f"{RunEpoch.begin(tmp_path).number} {changed.exists() and changed.read_text()}")
        )
        start.start()
        start.join(0.3)
        assert start.is_alive() and not begun
        holder.stdin.close()
        start.join(120)
    assert begun == ["2 whole"]


def test_a_change_that_never_ends_is_named_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch, "WAIT_S", 0.2)
    first = RunEpoch.begin(tmp_path)
    with first.hold(), pytest.raises(InfrastructureError, match="another process has been changing files of this run"):
        RunEpoch.begin(tmp_path)


def test_a_file_that_holds_no_number_is_named(tmp_path: Path) -> None:
    (tmp_path / ".epoch").write_text("what?")
    with pytest.raises(InfrastructureError, match=r"\.epoch: 'what\?' is not a start counter"):
        RunEpoch.begin(tmp_path)
