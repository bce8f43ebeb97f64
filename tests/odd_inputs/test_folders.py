# SPDX-License-Identifier: Apache-2.0
"""Of a folder, the rows of one split of one configuration are trained, or the folder is refused with the choices."""

import tomllib
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from relax_core.api import ConfigError
from relax_core.data.task_files import Files, TableSourceOptions

FOLDERS = tomllib.loads(Path(__file__).with_name("folders.toml").read_text())["folders"]


def prompts(path, split=""):
    source = Files(TableSourceOptions(split=split))
    source.open(str(path), {})
    return [source[index].prompt for index in range(len(source))]


@pytest.mark.parametrize("entry", FOLDERS, ids=[folder["name"] for folder in FOLDERS])
def test_one_split_of_one_configuration_is_read(tmp_path, entry):
    for name in (*entry["files"], *entry.get("others", ())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in entry["files"]:
        parquet.write_table(pyarrow.table({"prompt": [name]}), tmp_path / name)
    path, split = tmp_path / entry.get("path", ""), entry.get("split", "")
    if "read" in entry:
        assert prompts(path, split) == entry["read"]
        return
    with pytest.raises(ConfigError) as caught:
        prompts(path, split)
    assert all(part in str(caught.value) for part in entry["refused"])


def test_saved_datasets_are_splits_by_the_names_of_their_folders(tmp_path):
    for name in ("a/train", "a/test", "b/train"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        table = pyarrow.table({"prompt": [name]})
        with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table)
    assert prompts(tmp_path / "a", "train") == ["a/train"] and prompts(tmp_path / "b/train") == ["b/train"]
    with pytest.raises(ConfigError, match="the configurations a, b"):
        prompts(tmp_path, "train")
