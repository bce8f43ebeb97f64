# SPDX-License-Identifier: Apache-2.0
"""The file transports: conformance, and damage to the file itself."""

import errno
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.weights import Version
from relax_core.tensor_files import safetensors_file
from relax_core.tensor_files.transport import Disk, SharedMemory
from relax_core.testing.weight_transport import WeightTransportSuite, some_tensors

ONE = Version("actor", 0, 1)


class TestDisk(WeightTransportSuite):
    component = Disk


class TestSharedMemory(WeightTransportSuite):
    component = "shared-memory"


@pytest.mark.parametrize("size", [0, 4, 8, 20, -1])
def test_a_truncated_file_is_caught(tmp_path: Path, size: int) -> None:
    manifest = Disk().send(ONE, "full", "", some_tensors(), str(tmp_path))
    os.truncate(manifest.location, size if size >= 0 else os.path.getsize(manifest.location) + size)
    with pytest.raises(ValueError, match="truncated|header"):
        list(Disk().receive(manifest))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_the_data_is_caught(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        manifest = Disk().send(ONE, "full", "", some_tensors(), directory)
        path = Path(manifest.location)
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        at = data.draw(st.integers(start, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw)
        with pytest.raises(ValueError, match="have"):
            list(Disk().receive(manifest))


def test_safetensors_reads_the_file(tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    tensors = [item for item in some_tensors() if item[2] != "BF16"]
    manifest = Disk().send(ONE, "full", "", tensors, str(tmp_path))
    loaded = numpy_reader.load_file(manifest.location)
    assert loaded.keys() == {name for name, _, _ in tensors}
    for name, array, _ in tensors:
        np.testing.assert_array_equal(loaded[name], array)


def test_header_larger_than_reserved_moves_the_data_up() -> None:
    file = io.BytesIO()
    tensors = [(f"tensor.{i}", np.full((7,), i, np.float32), "F32") for i in range(100)]
    infos, needed = safetensors_file.write(file, tensors, {}, header_bytes=64)
    assert needed > 64
    assert len(infos) == 100
    assert file.getvalue()[needed:] == b"".join(array.tobytes() for _, array, _ in tensors)


def test_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def breaks_half_way() -> Iterator[tuple[str, np.ndarray, str]]:
        yield some_tensors()[0]
        raise RuntimeError("the rank died")

    with pytest.raises(RuntimeError, match="the rank died"):
        Disk().send(ONE, "full", "", breaks_half_way(), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_partial_files_of_a_dead_sender_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".actor@0.1.4711.tmp"
    left.write_bytes(b"half")
    other = tmp_path / ".critic@0.1.4711.tmp"
    other.write_bytes(b"half")
    Disk().send(ONE, "full", "", some_tensors(), str(tmp_path))
    assert not left.exists()
    assert other.exists()


def test_full_disk_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_file, "write", full)
    with pytest.raises(InfrastructureError, match="no space left"):
        Disk().send(ONE, "full", "", some_tensors(), str(tmp_path))


def test_shared_memory_outside_of_dev_shm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/dev/shm"):
        SharedMemory().send(ONE, "full", "", some_tensors(), str(tmp_path))


def test_a_message_about_a_file_has_a_bounded_length(tmp_path: Path) -> None:
    """Whatever names stand in the file: another process has written it."""
    long = "x" * 5000
    manifest = Disk().send(ONE, "full", "", some_tensors(), str(tmp_path))
    path = Path(manifest.location)
    known = {"version": str(ONE), "payload": "full", "base": ""}
    for metadata, tensors, said in (
        ({**known, "base": long}, some_tensors(), "holds version"),
        (known, [(long, np.zeros(2, np.float32), "F32")], "too many"),
    ):
        with path.open("wb") as file:
            safetensors_file.write(file, tensors, metadata, header_bytes=1 << 14)
        with pytest.raises(ValueError, match=said) as refused:
            list(Disk().receive(manifest))
        assert len(str(refused.value)) < 1500
    path.write_bytes(
        (40 + len(long)).to_bytes(8, "little") + b'{"' + long.encode() + b'": {"dtype": "F32"}}' + b" " * 99
    )
    with pytest.raises(ValueError, match="header is broken") as refused:
        list(Disk().receive(manifest))
    assert len(str(refused.value)) < 1500
