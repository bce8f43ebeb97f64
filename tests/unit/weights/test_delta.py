# SPDX-License-Identifier: Apache-2.0
"""The delta codec: exact for any bits, small for small steps, and never silent about damage; sent through files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from relax_core.api.weights import Manifest, Version, combined_fingerprint
from relax_core.tensor_files import delta
from relax_core.tensor_files.transport import Disk

DTYPES = ("u1", "u2", "u4", "u8", "i8", "f2", "f4", "f8", "b1")


def at(step: int) -> Version:
    return Version("actor", 0, step)


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of values rounded to the nearest."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 700), st.floats(0, 1), st.integers(0, 2**32), st.integers(1, 300))
def test_any_bits_come_back(dtype: str, size: int, share: float, seed: int, block: int) -> None:
    random = np.random.default_rng(seed)
    old, new = (random.integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8) for _ in range(2))
    width = np.dtype(dtype).itemsize
    keep = np.repeat(random.random(size) >= share, width)
    new[keep] = old[keep]
    before, after = old.view(dtype), new.view(dtype)
    with blocks_of(block):
        encoded = delta.encode(before, after)
        result = before.copy()
        delta.apply(result, encoded)
    assert result.tobytes() == after.tobytes()
    assert (len(encoded) == 0) == (before.tobytes() == after.tobytes())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_damage_raises_nothing_but_value_error(seed: int, data: st.DataObject) -> None:
    """Where the bytes still make sense, the fingerprint of the result tells (below, through files)."""
    random = np.random.default_rng(seed)
    old = random.integers(0, 1 << 16, 600, np.uint16)
    new = np.where(random.random(600) < 0.3, old + 1, old)
    with blocks_of(256):
        damaged = bytearray(delta.encode(old, new))
        cut = data.draw(st.booleans())
        place = data.draw(st.integers(0, len(damaged) - 1))
        if cut:
            del damaged[place:]
        else:
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        with contextlib.suppress(ValueError):
            delta.apply(old, bytes(damaged))
            assert not cut or not damaged


@contextlib.contextmanager
def blocks_of(size: int):  # type: ignore[no-untyped-def]
    before, delta.BLOCK_ELEMENTS = delta.BLOCK_ELEMENTS, size
    try:
        yield
    finally:
        delta.BLOCK_ELEMENTS = before


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
def test_a_step_at_an_rl_learning_rate_is_under_a_tenth_and_smaller_than_xor(lr: float) -> None:
    """Adam moves each weight by about the learning rate; trainers keep float32 and publish bf16."""
    random = np.random.default_rng(0)
    master = random.normal(0, 0.02, 1 << 18).astype(np.float32)
    old, new = bf16(master), bf16(master - lr * random.normal(0, 0.7, len(master)))
    size = len(delta.encode(old, new))
    xor = len(zstandard.ZstdCompressor(level=1).compress((old ^ new).tobytes()))
    assert size < 0.1 * new.nbytes
    assert size < 0.6 * xor


def test_arrays_that_are_not_alike_have_no_delta() -> None:
    with pytest.raises(ValueError, match="size or width differs"):
        delta.encode(np.zeros(3, np.float32), np.zeros(4, np.float32))


# -- through files ----------------------------------------------------------------------------------------------

Model = dict[str, np.ndarray]


def model(step: int) -> Model:
    random = np.random.default_rng(0)
    base = {"a": random.integers(0, 1 << 16, (64, 32)).astype(np.uint16), "b": np.arange(9, dtype=np.uint16)}
    base["scale"] = np.array(7, np.uint16)
    return base | {"a": base["a"] + np.uint16(step) * (base["a"] % 13 == 0).astype(np.uint16)}


def send(transport: Disk, step: int, weights: Model, directory: Path, base: int | None = None) -> Manifest:
    payload = "full" if base is None else "delta"
    tensors = ((name, array, "BF16") for name, array in weights.items())
    return transport.send(at(step), payload, "" if base is None else str(at(base)), tensors, str(directory))


def load(manifest: Manifest, weights: Model) -> Model:
    return weights | {i.name: np.array(a) for i, a in Disk().receive(manifest, weights.__getitem__)}


def test_a_chain_of_deltas_leads_to_the_same_bytes(tmp_path: Path) -> None:
    sender = Disk()
    manifests = [send(sender, 1, model(1), tmp_path)]
    manifests += [send(sender, step, model(step), tmp_path, step - 1) for step in (2, 3, 4)]
    held: Model = {}
    for step, manifest in enumerate(manifests, 1):
        held = load(manifest, held)
        assert {n: a.tobytes() for n, a in held.items()} == {n: a.tobytes() for n, a in model(step).items()}
        assert [info.name for info in manifest.tensors] == ["a", "b", "scale"]
    whole = send(Disk(), 4, model(4), tmp_path / "other")
    last = manifests[-1]
    assert (last.fingerprint, last.size_bytes) == (whole.fingerprint, whole.size_bytes)
    assert [info.name for info in last.sent] == ["a"]
    assert last.wire_fingerprint == combined_fingerprint(last.sent)
    assert 0 < last.wire_bytes < whole.size_bytes / 10
    assert {"gather", "hash", "write"} == set(last.seconds)


def test_after_a_failed_delta_only_a_full_version_is_accepted(tmp_path: Path) -> None:
    sender = Disk()
    send(sender, 1, model(1), tmp_path)
    with pytest.raises(ValueError, match="shorter"):
        send(sender, 2, {"a": model(2)["a"], "shorter": model(2)["b"]}, tmp_path, 1)
    with pytest.raises(ValueError, match="full version"):
        send(sender, 2, model(2), tmp_path, 1)
    assert load(send(sender, 2, model(2), tmp_path), {}).keys() == model(2).keys()


def test_a_tensor_left_out_of_a_delta_is_refused(tmp_path: Path) -> None:
    sender = Disk()
    send(sender, 1, model(1), tmp_path)
    with pytest.raises(ValueError, match=r"\['b', 'scale'\]"):
        send(sender, 2, {"a": model(2)["a"]}, tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["actor@0.1.safetensors"]


def test_a_flipped_bit_of_a_delta_is_caught(tmp_path: Path) -> None:
    sender = Disk()
    send(sender, 1, model(1), tmp_path)
    manifest = send(sender, 2, model(2), tmp_path, 1)
    size = os.path.getsize(manifest.location)
    raw = bytearray(Path(manifest.location).read_bytes())
    raw[size - 20] ^= 1
    Path(manifest.location).write_bytes(raw)
    with pytest.raises(ValueError, match="publish again"):
        load(manifest, model(1))


SENDER = """
import sys
from pathlib import Path

import numpy as np

from relax_core.api.weights import Version
from relax_core.tensor_files.transport import Disk


def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


size, random, disk = 1 << 20, np.random.default_rng(0), Disk()
arrays = {f"layer.{number}": random.integers(0, 1 << 16, size, np.uint16) for number in range(16)}
for step in range(3):
    for array in arrays.values():
        array[random.integers(0, size, size // 50)] += 1  # on every page
    tensors = ((name, array, "BF16") for name, array in arrays.items())
    base = str(Version("actor", 0, step - 1)) if step else ""
    disk.send(Version("actor", 0, step), "delta" if step else "full", base, tensors, sys.argv[1])
    before = before if step else anonymous()
print(anonymous() - before)
"""


def test_a_sender_of_deltas_through_a_disk_holds_no_second_model_in_memory(tmp_path: Path) -> None:
    """In a process of its own: what other tests hold and free is not counted."""
    done = subprocess.run([sys.executable, "-c", SENDER, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = 16 * (1 << 20) * 2
    assert int(done.stdout) < model / 4
    assert len(list(tmp_path.iterdir())) == 3, "what it keeps has no name"
