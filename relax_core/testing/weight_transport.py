# SPDX-License-Identifier: Apache-2.0
"""Conformance of weight transports: what arrives is what was sent, and every way to lie about it is caught.

class TestMine(WeightTransportSuite):
    component = "my-transport"       # or the class
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from relax_core.api.errors import RelaxError
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, WeightTransport, combined_fingerprint, tensor_fingerprint
from relax_core.testing.suite import Suite

Tensors = list[tuple[str, np.ndarray, str]]
_REFUSED = (ValueError, RelaxError)


def some_tensors(seed: int = 0) -> Tensors:
    """Shapes and dtypes of a small model: matrices, a vector, a scalar, bf16 bits, an empty one."""
    random = np.random.default_rng(seed)
    return [
        ("layers.0.weight", random.standard_normal((8, 4), np.float32), "F32"),
        ("layers.1.weight", random.standard_normal((8, 4), np.float32), "F32"),
        ("norm.weight", random.integers(0, 1 << 16, 5, np.uint16), "BF16"),
        ("scale", np.array(random.standard_normal(), np.float32), "F32"),
        ("steps", random.integers(0, 9, (3, 1), np.int64), "I64"),
        ("empty", np.zeros((0, 4), np.float32), "F32"),
    ]


class WeightTransportSuite(Suite):
    """Sender and receiver are two instances, as in two processes."""

    kind: ClassVar[str] = "weight-transport"

    @classmethod
    def build(cls) -> WeightTransport:
        transport = cls.make()
        assert isinstance(transport, WeightTransport)
        return transport

    @pytest.fixture
    def location(self, tmp_path: Path) -> Iterator[str]:
        """Where it may write; override for transports that need another place."""
        if not self.build().same_host or not Path("/dev/shm").is_dir():
            yield str(tmp_path)
            return
        directory = tempfile.mkdtemp(prefix="relax-test-", dir="/dev/shm")
        yield directory
        shutil.rmtree(directory)

    def send(self, location: str, step: int = 1, tensors: Tensors | None = None) -> Manifest:
        chosen = some_tensors() if tensors is None else tensors
        return self.build().send(Version("actor", 0, step), "full", "", chosen, location)

    def receive(self, manifest: Manifest) -> Tensors:
        return [(info.name, np.array(array), info.dtype) for info, array in self.build().receive(manifest)]

    def test_what_arrives_is_what_was_sent(self, location: str) -> None:
        sent = some_tensors()
        got = self.receive(self.send(location, tensors=sent))
        assert [(name, dtype) for name, _, dtype in got] == [(name, dtype) for name, _, dtype in sent]
        for (_, want, _), (_, have, _) in zip(sent, got, strict=True):
            assert have.shape == want.shape
            assert have.tobytes() == want.tobytes()

    def test_manifest_states_every_tensor(self, location: str) -> None:
        manifest = self.send(location)
        for (name, array, dtype), info in zip(some_tensors(), manifest.tensors, strict=True):
            assert (info.name, info.shape, info.dtype, info.size_bytes) == (name, array.shape, dtype, array.nbytes)
            assert info.fingerprint == tensor_fingerprint(array)
        assert manifest.fingerprint == combined_fingerprint(manifest.tensors)

    def test_tensors_may_come_from_a_generator(self, location: str) -> None:
        manifest = self.build().send(Version("actor", 0, 1), "full", "", iter(some_tensors()), location)
        assert len(self.receive(manifest)) == len(some_tensors())

    def test_versions_live_beside_each_other(self, location: str) -> None:
        sender = self.build()
        manifests = [sender.send(Version("actor", 0, s), "full", "", some_tensors(s), location) for s in (1, 2)]
        for step, manifest in enumerate(manifests, 1):
            assert self.receive(manifest)[0][1].tobytes() == some_tensors(step)[0][1].tobytes()

    def test_unchanged_tensors_are_named(self, location: str) -> None:
        sender = self.build()
        first = sender.send(Version("actor", 0, 1), "full", "", some_tensors(), location)
        changed = some_tensors()
        changed[0] = ("layers.0.weight", changed[0][1] + 1, "F32")
        second = sender.send(Version("actor", 0, 2), "full", "", changed, location)
        assert first.unchanged == ()
        assert set(second.unchanged) == {name for name, _, _ in changed[1:]}

    def test_released_version_is_not_received(self, location: str) -> None:
        manifest = self.send(location)
        self.build().release(manifest)
        with pytest.raises(_REFUSED):
            self.receive(manifest)

    def test_release_twice_is_harmless(self, location: str) -> None:
        manifest = self.send(location)
        self.build().release(manifest)
        self.build().release(manifest)

    def test_skipped_tensor_is_caught(self, location: str) -> None:
        whole = self.send(location, step=1)
        skipping = self.send(location, step=2, tensors=some_tensors()[1:])
        assert skipping.fingerprint != whole.fingerprint
        with pytest.raises(_REFUSED):
            self.receive(replace(whole, version=skipping.version, location=skipping.location))

    def test_stale_bytes_are_caught(self, location: str) -> None:
        stale = self.send(location, step=1)
        fresh = self.send(location, step=2, tensors=some_tensors(seed=1))
        with pytest.raises(_REFUSED):
            self.receive(replace(fresh, location=stale.location))

    def test_swapped_names_are_caught(self, location: str) -> None:
        tensors = some_tensors()
        right = self.send(location, step=1)
        (a, first, _), (b, second, _) = tensors[:2]
        wrong = self.send(location, step=2, tensors=[(b, first, "F32"), (a, second, "F32"), *tensors[2:]])
        assert wrong.fingerprint != right.fingerprint
        with pytest.raises(_REFUSED):
            self.receive(replace(right, version=wrong.version, location=wrong.location))

    def test_wrong_dtype_is_caught(self, location: str) -> None:
        manifest = self.send(location)
        lied = tuple(replace(info, dtype="F16") if info.dtype == "BF16" else info for info in manifest.tensors)
        with pytest.raises(_REFUSED):
            self.receive(replace(manifest, tensors=lied))
        with pytest.raises(_REFUSED):
            self.receive(replace(manifest, tensors=lied, fingerprint=combined_fingerprint(lied)))

    def test_array_of_another_dtype_is_not_sent(self, location: str) -> None:
        with pytest.raises(ValueError, match=r"norm\.weight"):
            self.send(location, tensors=[("norm.weight", np.zeros(3, np.float32), "BF16")])

    def test_name_sent_twice_is_refused(self, location: str) -> None:
        with pytest.raises(ValueError, match="twice"):
            self.send(location, tensors=[*some_tensors(), some_tensors()[0]])

    def test_version_without_tensors_is_refused(self, location: str) -> None:
        with pytest.raises(ValueError, match="no tensors"):
            self.send(location, tensors=[])

    def test_unknown_payload_is_refused(self, location: str) -> None:
        if "delta" in self.build().payloads:
            pytest.skip("moves deltas")
        with pytest.raises(ValueError, match="delta"):
            self.build().send(Version("actor", 0, 1), "delta", "actor@0.0", some_tensors(), location)
