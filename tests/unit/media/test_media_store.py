# SPDX-License-Identifier: Apache-2.0
"""The media store: what is put is what is got, by whoever has the directory; damage is found."""

import os
import resource
import signal

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from relax_core.api.errors import DiskFull, InfrastructureError
from relax_core.api.modality import ProcessedMedia
from relax_core.media.store import MediaStore, key_bytes, key_texts, tensors_of

KEY = "0123456789abcdef" * 2
TENSORS = st.dictionaries(
    st.text("abc_", min_size=1, max_size=8),
    arrays.arrays(
        st.sampled_from([np.float32, np.int64, np.uint8]),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    ),
    max_size=4,
)


@given(tensors=TENSORS, tokens=st.integers(0, 1 << 20))
def test_tensors_come_back_bit_for_bit(tmp_path_factory, tensors, tokens):
    folder = tmp_path_factory.mktemp("media")
    MediaStore(folder).put(ProcessedMedia(KEY, tensors, tokens))
    got = MediaStore(folder).get(KEY)
    assert (got.key, got.num_placeholders, set(got.tensors)) == (KEY, tokens, set(tensors))
    for name, tensor in tensors.items():
        assert (got.tensors[name].dtype, got.tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert got.tensors[name].tobytes() == tensor.tobytes()


def test_a_key_is_written_once(tmp_path):
    store = MediaStore(tmp_path / "media")
    assert KEY not in store
    store.put(ProcessedMedia(KEY, {"x": np.zeros(3)}, 1))
    store.put(ProcessedMedia(KEY, {"x": np.ones(3)}, 1))
    assert store.get(KEY).tensors["x"].sum() == 0 and KEY in store
    assert [path.name for path in (tmp_path / "media").iterdir()] == [f"{KEY}.media"]


DAMAGES = {
    "cut": lambda data: data[:-1], "changed": lambda data: data[:-1] + b"!", "empty": lambda data: b"",
    "noise": lambda data: b"\xff" * 99,
}  # fmt: skip


def test_missing_media_and_invalid_keys_are_distinguished(tmp_path):
    with pytest.raises(InfrastructureError, match="can't be read"):
        MediaStore(tmp_path).get(KEY)
    with pytest.raises(ValueError, match="hexadecimal"):
        MediaStore(tmp_path).get("../x")


def test_a_reader_keeps_no_more_than_it_may(tmp_path):
    store = MediaStore(tmp_path, keep_bytes=3000)
    keys = [f"{number:032x}" for number in range(8)]
    for key in keys:
        store.put(ProcessedMedia(key, {"x": np.zeros(1000, np.uint8)}, 1))
    for key in keys * 2:
        assert store.get(key).key == key
        assert store._kept_bytes <= 3000
    assert len(store._kept) == 3 and store.size_bytes() > 8000


def test_keys_travel_as_bytes():
    keys = [f"{number:032x}" for number in (1, 1 << 100, 7)]
    assert key_bytes(keys).shape == (3, 16) and key_texts(key_bytes(keys)) == keys
    assert key_bytes(()).shape == (0, 16)


def test_tensors_of_several_are_packed_in_order():
    one, other = (ProcessedMedia(KEY, {"x": np.full((n, 2), n)}, 1) for n in (1, 3))
    assert tensors_of([one, other])["x"][:, 0].tolist() == [1, 3, 3, 3] and tensors_of([]) == {}


def test_many_small_media_hold_no_descriptors(tmp_path):
    import psutil

    store = MediaStore(tmp_path)
    for at in range(64):
        store.put(ProcessedMedia(f"{at:032x}", {"x": np.full(100, at)}, 1).laid_out("image"))
    before = psutil.Process().num_fds()
    seen = [store.get(f"{at:032x}").tensors["x"][0] for at in range(64)]
    assert seen == list(range(64)) and psutil.Process().num_fds() <= before + 2
    large = ProcessedMedia("f" * 32, {"x": np.arange(1 << 18)}, 1).laid_out("image")
    store.put(large)
    got = store.get("f" * 32).tensors["x"]
    np.testing.assert_array_equal(got, large.tensors["x"])
    assert psutil.Process().num_fds() > before, "a large one is mapped"


def test_a_medium_without_disk_space_is_reported_and_leaves_no_partial_file(tmp_path):
    store, medium = MediaStore(tmp_path), ProcessedMedia(KEY, {"x": np.zeros(10_000)}, 1).laid_out("image")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(DiskFull, match=rf"{KEY}.media: no space left to write .*free some.*relax resume"):
            store.put(medium)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    store.put(medium)
    assert KEY in MediaStore(tmp_path)


def test_a_damaged_file_is_not_read_again_and_is_replaced(tmp_path):
    store, medium = MediaStore(tmp_path), ProcessedMedia(KEY, {"x": np.arange(9)}, 1)
    for damage in DAMAGES.values():
        store.put(medium)
        path = tmp_path / f"{KEY}.media"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(InfrastructureError, match="can't be read"):
            MediaStore(tmp_path).get(KEY)
        assert KEY not in store and store.damaged() == [KEY]
        store.put(medium)
        assert MediaStore(tmp_path).get(KEY).tensors["x"].tolist() == list(range(9))
        path.write_bytes(damage(path.read_bytes()))
        MediaStore(tmp_path).put(medium)
        assert MediaStore(tmp_path).get(KEY).tensors["x"].tolist() == list(range(9))
        store.clear_damaged(KEY)
        path.unlink()


def _calls(monkeypatch, at=None):
    """Note the calls that make a file durable, and kill this process before the one at this place."""
    done = []

    def noted(name, call, target):
        def own(*args):
            if len(done) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append((name, target(*args)))
            return call(*args)

        monkeypatch.setattr(os, name, own)

    def of(file):
        return os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)

    noted("fsync", os.fsync, of)
    noted("rename", os.rename, lambda source, target, **_: of(target))
    return done


def test_a_medium_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = _calls(monkeypatch)
    MediaStore(tmp_path).put(ProcessedMedia(KEY, {"x": np.zeros(1000)}, 1))
    partial, path = tmp_path / f"{KEY}.{os.getpid()}", tmp_path / f"{KEY}.media"
    assert done == [("fsync", str(partial)), ("rename", str(path)), ("fsync", str(tmp_path))]


@pytest.mark.parametrize("at", range(3))
def test_a_writer_that_is_killed_at_any_point_leaves_a_whole_file_or_none(tmp_path, monkeypatch, at):
    medium = ProcessedMedia(KEY, {"x": np.arange(1000)}, 1)
    child = os.fork()
    if not child:
        _calls(monkeypatch, at)
        MediaStore(tmp_path).put(medium)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    store = MediaStore(tmp_path)
    assert list(store.found()) == ([KEY] if at == 2 else [])
    assert {path.suffix for path in tmp_path.iterdir()} <= {".media"}
    store.put(medium)
    assert store.get(KEY).tensors["x"].tolist() == list(range(1000))
