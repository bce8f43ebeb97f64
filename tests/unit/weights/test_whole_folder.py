# SPDX-License-Identifier: Apache-2.0
"""A folder that is written anew is there whole under its name, however its writer ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.tensor_files.whole_folder import finish_replacement, new_folder


def write(final: Path, text: str) -> None:
    with new_folder(final) as unfinished:
        (unfinished / "more").mkdir()
        (unfinished / "more" / "text").write_text(text)


def text(final: Path) -> str:
    return (final / "more" / "text").read_text()


class Killed(BaseException):
    """The end of a process at this point."""


@pytest.mark.parametrize(("renames", "found"), [(0, "former"), (1, "new"), (2, "new")])
def test_a_writer_that_is_killed_between_its_renames_leaves_a_whole_folder(tmp_path, monkeypatch, renames, found):
    final, done = tmp_path / "export", list[Path]()
    write(final, "former")
    rename = Path.rename

    def rename_until_killed(path: Path, target: Path) -> Path:
        if len(done) == renames:
            raise Killed
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename_until_killed)
        patched.setattr("relax_core.tensor_files.whole_folder.shutil.rmtree", lambda *_, **__: None)  # nothing runs on
        if renames == 2:
            write(final, "new")
        else:
            with pytest.raises(Killed):
                write(final, "new")
    assert (renames == 1) != final.exists()
    finish_replacement(final)
    assert text(final) == found and [path.name for path in tmp_path.iterdir()] == ["export"]


def test_the_next_writer_finishes_what_another_one_had_begun(tmp_path):
    final = tmp_path / "export"
    write(final, "former")
    final.rename(tmp_path / ".export.77.old")
    with pytest.raises(OSError, match="no room"), new_folder(final) as unfinished:
        (unfinished / "half").write_text("of it")
        raise OSError("no room")
    assert text(final) == "former" and [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_rename_that_fails_leaves_the_former_folder_in_its_place(tmp_path, monkeypatch):
    final, rename = tmp_path / "export", Path.rename
    write(final, "former")

    def refuses_the_new_one(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise OSError("the disk is away")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuses_the_new_one)
    with pytest.raises(OSError, match="the disk is away"):
        write(final, "new")
    assert text(final) == "former" and [path.name for path in tmp_path.iterdir()] == ["export"]
