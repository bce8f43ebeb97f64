# SPDX-License-Identifier: Apache-2.0
"""Pages of released versions that are used again: nobody who reads sees them change."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import Manifest, Version
from relax_core.tensor_files.transport import SharedMemory

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory-backed directory")
VALUES = 5000


@pytest.fixture
def location() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="relax-test-", dir="/dev/shm") as directory:
        yield directory


def _send(sender: SharedMemory, step: int, location: str, values: int = VALUES) -> Manifest:
    tensors = [("a", np.full(values, step, np.float32), "F32"), ("b", np.full((3, 5), -step, np.int64), "I64")]
    return sender.send(Version("actor", 0, step), "full", "", tensors, location)


def _inode(manifest: Manifest) -> int:
    return os.stat(manifest.location).st_ino


def _values(receiver: SharedMemory, manifest: Manifest) -> list[np.ndarray]:
    return [array for _, array in receiver.receive(manifest)]


def _read(receiver: SharedMemory, manifest: Manifest, values: int = VALUES) -> bool:
    a, b = _values(receiver, manifest)
    step = manifest.version.step
    return a.shape == (values,) and bool((a == step).all()) and bool((b == -step).all())


def test_two_files_are_enough_for_any_number_of_versions(location: str) -> None:
    sender, receiver, releaser = SharedMemory(), SharedMemory(), SharedMemory()
    inodes, last = list[int](), None
    for step in range(1, 8):
        manifest = _send(sender, step, location)
        assert _read(receiver, manifest)
        inodes.append(_inode(manifest))
        if last is not None:
            releaser.release(last)
        last = manifest
    assert len(set(inodes)) == 2
    assert len(os.listdir(location)) == 2


def test_pages_are_freed_with_the_last_view(location: str) -> None:
    sender, receiver = SharedMemory(), SharedMemory()
    one = _send(sender, 1, location)
    before, held = _inode(one), _values(receiver, one)
    sender.release(one)
    del held
    assert _inode(_send(sender, 2, location)) == before


def test_a_version_is_kept_while_a_receiver_reads_it(location: str) -> None:
    sender, receiver = SharedMemory(), SharedMemory()
    one = _send(sender, 1, location)
    arriving = receiver.receive(one)
    next(arriving)
    sender.release(one)
    _send(sender, 2, location)
    assert (next(arriving)[1] == -1).all()


def test_a_released_version_is_refused_for_any_content_of_its_pages(location: str) -> None:
    sender, receiver = SharedMemory(), SharedMemory()
    one = _send(sender, 1, location)
    sender.release(one)
    with pytest.raises(InfrastructureError, match="released"):
        list(receiver.receive(one))
    _send(sender, 2, location)
    with pytest.raises(InfrastructureError, match="released"):
        list(receiver.receive(one))


def test_an_aborted_send_leaves_no_file(location: str) -> None:
    sender = SharedMemory()
    sender.release(_send(sender, 1, location))

    def breaks() -> Iterator[tuple[str, np.ndarray, str]]:
        yield "a", np.zeros(VALUES, np.float32), "F32"
        raise RuntimeError("the rank died")

    with pytest.raises(RuntimeError, match="the rank died"):
        sender.send(Version("actor", 0, 2), "full", "", breaks(), location)
    assert os.listdir(location) == []
    assert _read(SharedMemory(), _send(sender, 3, location))


def test_a_delta_is_made_against_bytes_that_stay(location: str) -> None:
    sender, receiver = SharedMemory(), SharedMemory()
    one = _send(sender, 1, location)
    have = {info.name: array.copy() for info, array in receiver.receive(one)}
    for step in (2, 3):
        tensors = [("a", np.full(VALUES, step, np.float32), "F32"), ("b", np.full((3, 5), -1, np.int64), "I64")]
        base = str(Version("actor", 0, step - 1))
        delta = sender.send(Version("actor", 0, step), "delta", base, tensors, location)
        have |= {info.name: array.copy() for info, array in receiver.receive(delta, have.__getitem__)}
        assert (have["a"] == step).all()
        if step == 2:
            sender.release(one)
            SharedMemory().send(
                Version("actor", 1, 9), "full", "", [("a", np.zeros(VALUES, np.float32), "F32")], location
            )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(("send", "read", "hold", "drop", "release")), max_size=30))
def test_no_view_ever_changes(steps: list[str]) -> None:
    sender, receiver = SharedMemory(), SharedMemory()
    sent, held, step = list[Manifest](), list[tuple[int, np.ndarray]](), 0
    with tempfile.TemporaryDirectory(prefix="relax-test-", dir="/dev/shm") as location:
        for what in steps:
            if what == "send":
                step += 1
                sent.append(_send(sender, step, location, (64, 3, 9000)[step % 3]))
            elif what == "release" and sent:
                sender.release(sent.pop(0))
            elif what == "drop" and held:
                held.pop(0)
            elif what in ("read", "hold") and sent:
                array = _values(receiver, sent[-1])[0][1:].view(np.uint32).view(np.float32)
                if what == "hold":
                    held.append((sent[-1].version.step, array))
            assert all((array == version).all() for version, array in held)
