# SPDX-License-Identifier: Apache-2.0
"""Blocks as files in memory: whole or not at all, plain numbers only, and never outside their folder."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from relax_core.api.batch import Ragged
from relax_core.api.errors import InfrastructureError
from relax_core.runners.ray import block_folder
from relax_core.runners.ray.block_folder import BlockFolder

DTYPES = st.sampled_from(["<i4", "<i8", "<f2", "<f4", "|b1", "|u1", "<u2"])
BLOCKS = st.lists(
    DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0))), max_size=4
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    return BlockFolder(str(tmp_path))


def rows(values: np.ndarray) -> Ragged:
    """One row of all values, and one of none."""
    return Ragged(values, np.array([len(values), 0]))


@settings(max_examples=50, deadline=None)
@given(values=BLOCKS, small=st.booleans())
def test_a_block_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, values: list[np.ndarray], small: bool
) -> None:
    folder = BlockFolder(str(tmp_path_factory.mktemp("blocks")))
    names = [f"column-{number}" for number in range(len(values))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_folder, "MAPPED_BYTES", 1 << 17 if small else 0)
        assert folder.write(7, {name: rows(value) for name, value in zip(names, values, strict=True)})
        found = folder.read(7, names)
    assert found is not None
    assert list(found) == names
    for name, value in zip(names, values, strict=True):
        assert found[name].values.dtype == value.dtype
        assert found[name].values.shape == value.shape
        assert found[name].values.tobytes() == value.tobytes()
        assert found[name].lengths.tolist() == [len(value), 0]
        assert not found[name].values.flags.writeable


def test_a_transposed_column_is_written_as_it_reads_and_columns_that_are_not_there_are_left_out(
    folder: BlockFolder,
) -> None:
    values = np.arange(12).reshape(3, 4).T
    folder.write(1, {"a": rows(values), "b": rows(np.arange(5))})
    found = folder.read(1, ("a", "c"))
    assert found is not None and list(found) == ["a"]
    np.testing.assert_array_equal(found["a"].values, values)
    assert folder.read(2, ("a",)) is None


@pytest.mark.parametrize("values", [np.array([{}], object), np.zeros(2, "V2"), np.array(["a"])])
def test_values_that_are_not_plain_numbers_are_not_written(folder: BlockFolder, values: np.ndarray) -> None:
    assert not folder.write(1, {"a": rows(values)})
    assert os.listdir(folder.path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_memory_leaves_nothing(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    block = {"a": rows(np.arange(100))}
    monkeypatch.setattr(Path, "rename", full)
    assert not folder.write(1, block)
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=1000))
    assert not folder.write(1, block)
    assert os.listdir(folder.path) == []


@pytest.mark.parametrize("data", [b"", b"something else altogether", struct.pack("<Q", 1 << 40)])
def test_a_damaged_file_is_an_error(folder: BlockFolder, data: bytes) -> None:
    Path(folder.path, "1").write_bytes(data)
    with pytest.raises(InfrastructureError, match="block 1 .* damaged"):
        folder.read(1, ("a",))


def test_a_name_that_leads_elsewhere_is_refused(folder: BlockFolder, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = BlockFolder(str(tmp_path_factory.mktemp("outside")))
    outside.write(1, {"a": rows(np.arange(3))})
    Path(folder.path, "1").symlink_to(Path(outside.path, "1"))
    with pytest.raises(OSError, match="symbolic link"):
        folder.read(1, ("a",))
    with pytest.raises(ValueError, match="invalid literal"):
        folder.read("../1", ("a",))  # type: ignore[arg-type]


def test_freed_blocks_are_deleted_and_read_arrays_stay(folder: BlockFolder) -> None:
    values = np.arange(1 << 16)
    folder.write(1, {"a": rows(values)})
    found = folder.read(1, ("a",))
    Path(folder.path, "2.part").touch()
    folder.free([1, 2, 3])
    assert os.listdir(folder.path) == []
    assert found is not None
    np.testing.assert_array_equal(found["a"].values, values)


def test_a_folder_is_made_with_its_owners_mark_and_only_in_memory(tmp_path: Path) -> None:
    made = BlockFolder.make("mine", tmp_path)
    assert made is not None
    assert made.here
    assert Path(made.path, "owner.json").exists()
    assert Path(made.path).stat().st_mode & 0o777 == 0o700
    made.remove()
    assert not made.here
    assert BlockFolder.make("mine", tmp_path / "none") is None


def test_a_folder_is_taken_over_with_its_blocks(tmp_path: Path) -> None:
    before = BlockFolder.make("mine", tmp_path)
    assert before is not None
    before.write(3, {"a": rows(np.arange(4))})
    Path(before.path, "4.part").touch()
    after = BlockFolder.make("mine", tmp_path)
    assert after is not None and after.keys() == [3]
