# SPDX-License-Identifier: Apache-2.0
"""The folder of a `relax rollout` as a task file: unfinished, damaged and unfit files are refused with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from relax_plugin_workbench.sample_file import SampleFile
from relax_plugin_workbench.sample_parquet import write_parquet

from relax_core.api.errors import ConfigError
from relax_core.data.task_files import Files
from relax_core.observe.redaction import Redactor


def writer(folder: Path) -> SampleFile:
    return SampleFile(folder / "samples.jsonl", 1, Redactor([]))


def refused(path: Path, **columns: str) -> str:
    with pytest.raises(ConfigError) as error:
        Files().open(str(path), columns)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file = writer(tmp_path)
    for number in range(3):
        file.append([{"group_id": number, "sample_index": 0, "task_id": "t", "prompt": "2+2?", "response": "4",
                      "reward": 1.0}])  # fmt: skip
    file.close()
    return tmp_path


def test_lines_that_a_rollout_still_writes_are_refused_and_can_be_continued_while_they_are_read(folder: Path) -> None:
    file = writer(folder)
    assert "samples.jsonl, which another process writes; wait for the end" in refused(folder / "samples.jsonl")
    file.close()
    source = Files()
    source.open(str(folder / "samples.jsonl"), {"completion": "response"})
    assert len(source) == 3
    writer(folder).close()


def test_a_folder_without_a_table_is_refused_by_the_name_of_its_file(folder: Path) -> None:
    assert "name a file of the folder, such as samples.jsonl" in refused(folder)
    write_parquet(folder / "samples.jsonl", folder / "samples.parquet")
    source = Files()
    source.open(str(folder), {"completion": "response"})
    assert [source[index].column("completion") for index in range(3)] == ["4"] * 3


def test_a_file_that_is_cut_off_is_refused_with_the_place(folder: Path) -> None:
    write_parquet(folder / "samples.jsonl", folder / "samples.parquet")
    for name, said in (("samples.jsonl", "samples.jsonl:3: malformed JSON"), ("samples.parquet", "can't be read (")):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-9])
        assert said in refused(folder / name)


def test_a_column_that_no_sample_has_is_refused_by_name(folder: Path) -> None:
    write_parquet(folder / "samples.jsonl", folder / "samples.parquet")
    for path in (folder, folder / "samples.jsonl"):
        assert "no row has the column 'text', which `columns` names for 'completion'" in refused(
            path, completion="text"
        )
