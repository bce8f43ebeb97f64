# SPDX-License-Identifier: Apache-2.0
"""Small files that a resume reads are on the disk before they count, whole and under their name, also after a power cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.api.errors import ConfigError
from relax_core.control.stages import StageDirectory
from relax_core.registry.catalogue import Catalogue
from tests.unit.control.conftest import configured


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """What the disk was asked to keep and to rename, in order, with the size that it had then."""
    told: list[tuple[str, str, int]] = []
    sync, replace = os.fsync, os.replace

    def syncs(descriptor: int) -> None:
        told.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))
        sync(descriptor)

    def replaces(source: str | Path, target: str | Path) -> None:
        told.append(("name", str(target), os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", replaces)
    return told


def finish(folder: Path) -> Path:
    StageDirectory(0, "warm-start", folder).finish({"steps": 3})
    return folder / "stage.json"


def configure(folder: Path) -> Path:
    StageDirectory(0, "warm-start", folder).write(configured(Catalogue.load()))
    return folder / "config.toml"


@pytest.mark.parametrize("write", [finish, configure])
def test_a_state_file_reaches_the_disk_then_gets_its_name_then_the_name_is_kept(
    tmp_path: Path, told: list[tuple[str, str, int]], write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path)
    size = path.stat().st_size
    named_at = told.index(("name", str(path), size))
    before, after = told[:named_at], told[named_at + 1 :]
    assert size > 0
    assert [(what, Path(name).parent) for what, name, own in before if own == size] == [("sync", path.parent)]
    assert ("sync", str(path.parent)) in [(what, name) for what, name, _ in after]


def test_the_folders_of_a_new_stage_are_kept_too(tmp_path: Path, told: list[tuple[str, str, int]]) -> None:
    configure(tmp_path / "stages" / "0-warm-start")
    assert {str(tmp_path), str(tmp_path / "stages")} <= {name for what, name, _ in told if what == "sync"}


def test_an_account_that_is_not_a_document_is_named_and_says_what_to_do(tmp_path: Path) -> None:
    stage = StageDirectory(0, "warm-start", tmp_path)
    assert stage.account() is None
    (tmp_path / "stage.json").write_text("")
    with pytest.raises(ConfigError, match=r"stage\.json: got text that is not JSON .*remove the file"):
        stage.account()
