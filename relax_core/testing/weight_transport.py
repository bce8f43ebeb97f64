# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of weight transports: exact transfer of tensors, and detection of every corruption.

    class TestMine(WeightTransportSuite):
        component = "my-transport"       # or the class

Corruptions are in `weight_transport_corruptions`. Each corruption is tested with each payload, through the real chain
from sender to receipt.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_core.api.weights import (
    Manifest,
    Payload,
    Resident,
    Version,
    WeightTransport,
    combined_fingerprint,
    tensor_fingerprint,
)
from relax_core.testing.suite import Suite
from relax_core.testing.weight_transport_corruptions import CORRUPTIONS, corruptions_of
from relax_core.testing.weight_transport_fixture import REFUSED, PublishedChain, Transfer, moved

Tensors = list[tuple[str, np.ndarray, str]]
PAYLOADS: tuple[Payload, ...] = ("full", "delta", "lora")


def some_tensors(seed: int = 0) -> Tensors:
    """Make tensors of different shapes and dtypes: matrices, bf16 bits, a scalar, integers, an empty tensor."""
    random = np.random.default_rng(seed)
    return [
        ("layers.0.weight", random.standard_normal((8, 4), np.float32), "F32"),
        ("layers.1.weight", random.standard_normal((8, 4), np.float32), "F32"),
        ("norm.weight", random.integers(0, 1 << 16, 5, np.uint16), "BF16"),
        ("scale", np.array(random.standard_normal(), np.float32), "F32"),
        ("steps", random.integers(0, 9, (3, 1), np.int64), "I64"),
        ("empty", np.zeros((0, 4), np.float32), "F32"),
    ]


def some_adapters(seed: int = 0) -> Tensors:
    """Make a rank-2 adapter of two matrices with the names of peft."""
    random = np.random.default_rng(seed)
    prefix = "base_model.model.layers"
    return [
        (f"{prefix}.{layer}.q_proj.lora_{side}.weight", random.integers(0, 1 << 16, shape, np.uint16), "BF16")
        for layer in (0, 1)
        for side, shape in (("A", (2, 8)), ("B", (8, 2)))
    ]


def tensors_of(payload: str) -> Tensors:
    return some_adapters() if payload == "lora" else some_tensors()


class WeightTransportSuite(Suite):
    """The suite of a weight transport; a subclass sets `component`. Sender and receiver are separate instances."""

    kind: ClassVar[str] = "weight-transport"
    # A transport alone computes nothing; the tests below transfer tensors.
    test_the_same_input_gives_the_same_result: Any = None
    test_every_process_gives_the_same_result: Any = None

    @classmethod
    def build(cls) -> WeightTransport:
        transport = cls.make()
        assert isinstance(transport, WeightTransport)
        return transport

    @pytest.fixture
    def location(self, tmp_path: Path) -> Iterator[str]:
        """Yield a directory that the transport may write; override it for transports that need a different place."""
        if not self.build().same_host or not Path("/dev/shm").is_dir():
            yield str(tmp_path)
            return
        directory = tempfile.mkdtemp(prefix="relax-test-", dir="/dev/shm")
        yield directory
        shutil.rmtree(directory)

    @pytest.fixture
    def sender(self) -> WeightTransport:
        """Make the sending instance, which lives until its versions are received."""
        return self.build()

    def send(
        self, sender: WeightTransport, location: str, step: int = 1, tensors: Tensors | None = None,
        payload: Payload = "full", base: str = "",
    ) -> Manifest:  # fmt: skip
        chosen = some_tensors() if tensors is None else tensors
        return sender.send(Version("actor", 0, step), payload, base, chosen, location)

    def receive(
        self, sender: WeightTransport, manifest: Manifest, tensors: Tensors | None = None,
        resident: Resident | None = None,
    ) -> Tensors:  # fmt: skip
        """Receive a version with a new instance, while a live sender transfers it."""
        with Transfer(sender, manifest, some_tensors() if tensors is None else tensors):
            arrived = self.build().receive(manifest, resident)
            return [(info.name, np.array(array), info.dtype) for info, array in arrived]

    def equal(self, got: Tensors, want: Tensors) -> None:
        assert [(name, dtype) for name, _, dtype in got] == [(name, dtype) for name, _, dtype in want]
        for (_, have, _), (_, array, _) in zip(got, want, strict=True):
            assert have.shape == array.shape
            assert have.tobytes() == array.tobytes()

    # -- what is sent arrives -----------------------------------------------------------------------------------

    def test_received_tensors_equal_sent_tensors(self, sender: WeightTransport, location: str) -> None:
        self.equal(self.receive(sender, self.send(sender, location)), some_tensors())

    def test_manifest_states_every_tensor(self, sender: WeightTransport, location: str) -> None:
        manifest = self.send(sender, location)
        for (name, array, dtype), info in zip(some_tensors(), manifest.tensors, strict=True):
            assert (info.name, info.shape, info.dtype, info.size_bytes) == (name, array.shape, dtype, array.nbytes)
            assert info.fingerprint == tensor_fingerprint(array)
        assert manifest.fingerprint == combined_fingerprint(manifest.tensors)
        assert manifest.live == sender.live

    def test_tensors_may_come_from_a_generator(self, sender: WeightTransport, location: str) -> None:
        manifest = sender.send(Version("actor", 0, 1), "full", "", iter(some_tensors()), location)
        assert len(self.receive(sender, manifest)) == len(some_tensors())

    def test_several_receivers_take_one_version(self, sender: WeightTransport, location: str) -> None:
        manifest = self.send(sender, location)
        for _ in range(2):
            self.equal(self.receive(sender, manifest), some_tensors())

    def test_several_versions_are_kept_at_once(self, sender: WeightTransport, location: str) -> None:
        if sender.live:
            pytest.skip("a live transport sends only the newest version")
        manifests = [self.send(sender, location, step, some_tensors(step)) for step in (1, 2)]
        for step, manifest in enumerate(manifests, 1):
            self.equal(self.receive(sender, manifest), some_tensors(step))

    def test_unchanged_tensors_are_named(self, sender: WeightTransport, location: str) -> None:
        first = self.send(sender, location)
        changed = some_tensors()
        changed[0] = ("layers.0.weight", changed[0][1] + 1, "F32")
        second = self.send(sender, location, 2, changed)
        assert first.unchanged == ()
        assert set(second.unchanged) == {name for name, _, _ in changed[1:]}

    def test_an_adapter_arrives(self, sender: WeightTransport, location: str) -> None:
        self.needs(sender, "lora")
        manifest = self.send(sender, location, 1, some_adapters(), "lora", "the base model")
        assert (manifest.payload, manifest.base) == ("lora", "the base model")
        self.equal(self.receive(sender, manifest, some_adapters()), some_adapters())

    def test_a_delta_brings_what_changed_and_nothing_else(self, sender: WeightTransport, location: str) -> None:
        self.needs(sender, "delta")
        chain = PublishedChain.begin(sender, self.build(), location, "delta", some_tensors())
        before, after = chain.receiver.tensors.copy(), moved(chain.now)
        manifest = chain.send(after)
        got = self.receive(sender, manifest, after, lambda name: before[name][0])
        self.equal(got, [one for one in after if one[0] not in manifest.unchanged])
        assert {info.name for info in manifest.sent} == {name for name, _, _ in got} < {name for name, _, _ in after}
        assert manifest.fingerprint == combined_fingerprint(manifest.tensors)

    # -- release and refusal ------------------------------------------------------------------------------------

    def test_released_version_is_not_received(self, sender: WeightTransport, location: str) -> None:
        manifest = self.send(sender, location)
        (sender if sender.live else self.build()).release(manifest)
        with pytest.raises(REFUSED):
            self.receive(sender, manifest)

    def test_release_twice_is_harmless(self, sender: WeightTransport, location: str) -> None:
        manifest = self.send(sender, location)
        self.build().release(manifest)
        self.build().release(manifest)

    def test_credentials_of_receivers_are_never_shown(self, sender: WeightTransport, location: str) -> None:
        manifest = self.send(sender, location)
        assert not manifest.secret or manifest.secret not in f"{manifest!r} {manifest}"

    def test_array_of_another_dtype_is_not_sent(self, sender: WeightTransport, location: str) -> None:
        with pytest.raises(ValueError, match=r"norm\.weight"):
            self.send(sender, location, tensors=[("norm.weight", np.zeros(3, np.float32), "BF16")])

    def test_name_sent_twice_is_refused(self, sender: WeightTransport, location: str) -> None:
        with pytest.raises(ValueError, match="twice"):
            self.send(sender, location, tensors=[*some_tensors(), some_tensors()[0]])

    def test_version_without_tensors_is_refused(self, sender: WeightTransport, location: str) -> None:
        with pytest.raises(ValueError, match="no tensors"):
            self.send(sender, location, tensors=[])

    def test_unknown_payload_is_refused(self, sender: WeightTransport, location: str) -> None:
        with pytest.raises(ValueError, match="sketch"):
            sender.send(Version("actor", 0, 1), "sketch", "", some_tensors(), location)  # type: ignore[arg-type]

    def test_a_delta_of_another_version_than_the_last_is_not_sent(self, sender: WeightTransport, location: str) -> None:
        self.needs(sender, "delta")
        chain = PublishedChain.begin(sender, self.build(), location, "delta", some_tensors())
        with pytest.raises(ValueError, match=r"actor@0\.0"):
            self.send(sender, location, chain.version.step + 1, moved(chain.now), "delta", "actor@0.0")

    # -- corruptions --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("corruption", "payload"),
        [(name, payload) for payload in PAYLOADS for name in corruptions_of(payload)],
    )
    def test_every_corruption_is_caught_within_one_publish(
        self, sender: WeightTransport, location: str, corruption: str, payload: Payload
    ) -> None:
        self.needs(sender, payload)
        chain = PublishedChain.begin(sender, self.build(), location, payload, tensors_of(payload))
        with pytest.raises(REFUSED):
            CORRUPTIONS[corruption](chain)
        proved = chain.registry.receivers("actor")
        assert proved.get("engine-0", chain.version) == chain.version

    def test_an_honest_publish_after_another_is_proved(self, sender: WeightTransport, location: str) -> None:
        for payload in PAYLOADS:
            if payload in sender.payloads:
                own = f"{location}/{payload}"
                chain = PublishedChain.begin(self.build(), self.build(), own, payload, tensors_of(payload))
                chain.publish(moved(chain.now))
                assert chain.registry.receivers("actor") == {"engine-0": chain.version}

    def needs(self, sender: WeightTransport, payload: str) -> None:
        if payload not in sender.payloads:
            pytest.skip(f"payloads of the transport do not include {payload}")
