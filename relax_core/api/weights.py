# SPDX-License-Identifier: Apache-2.0
"""Published weights: a manifest of what a version is, a transport that moves it, a receipt of what arrived.

A version names a model, an incarnation of its trainer, and the steps completed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, NamedTuple, TypeAlias

from relax_core.api.component import Configurable, OptionsT

if TYPE_CHECKING:
    import numpy as np


class Version(NamedTuple):
    """Completed steps of one model; ordered by incarnation, then step."""

    model: str
    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.model}@{self.incarnation}.{self.step}"

    def next(self) -> Version:
        return self._replace(step=self.step + 1)

    def supersedes(self, other: Version) -> bool:
        """Tell whether a receiver that has `other` may load this one: same model, same or newer incarnation."""
        return self.model == other.model and self[1:] >= other[1:] and self.incarnation >= other.incarnation


ReceiptLevel = Literal["wire", "resident", "behaviour"]
Payload = Literal["full", "delta", "lora"]
Resident: TypeAlias = "Callable[[str], np.ndarray]"
"""By Hugging Face name: the array a receiver holds now, in the dtype of the manifest."""
Tensors: TypeAlias = "Iterable[tuple[str, np.ndarray, str]]"
"""(name, array, dtype as safetensors call it)."""
PLAIN = "hugging-face"
"""Layout of an engine that holds exactly the published tensors: its memory's fingerprint is the manifest's."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor under its Hugging Face or peft name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As in safetensors: F32, BF16, F16, ..."""
    fingerprint: str
    """xxh3-128 of its bytes, hexadecimal."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Canary:
    """A short sequence and what the trainer thinks of it: an engine that disagrees does not have these weights."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """[tokens] of each token given those before it, of logits / temperature; the first is 0."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of one version of the weights, tensor by tensor."""

    version: Version
    payload: Payload
    tensors: tuple[TensorInfo, ...]
    location: str
    """Where the transport put it: a path, an address."""
    base: str = ""
    """delta, lora: the version or base-model fingerprint it is on top of."""
    fingerprint: str = ""
    """`combined_fingerprint` of all tensors."""
    unchanged: tuple[str, ...] = ()
    """Names whose bytes equal the last version's; all of them unchanged after an update is a fault."""
    wire_bytes: int = 0
    """What really travels: of a delta far less than `size_bytes`; 0 is all of them."""
    canary: Canary | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the sender's time went: gather, hash, write."""
    live: bool = False
    """Nothing is stored: it is had only while its sender hands it out; who comes later must want it."""
    secret: str = field(default="", repr=False)
    """What a receiver must know to be let in; never shown, logged or written."""

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def sent(self) -> tuple[TensorInfo, ...]:
        """Tensors that travel: of a delta only those that changed; `tensors` always describes the whole result."""
        if self.payload != "delta":
            return self.tensors
        same = frozenset(self.unchanged)
        return tuple(tensor for tensor in self.tensors if tensor.name not in same)

    @property
    def wire_fingerprint(self) -> str:
        """Return the value that a receipt's `fingerprint` must have."""
        return combined_fingerprint(self.sent)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receiver's proof: the fingerprint of what it really loaded."""

    receiver: str
    version: Version
    level: ReceiptLevel
    fingerprint: str
    """`combined_fingerprint` of what arrived, under the manifest's names: `Manifest.wire_fingerprint` if all did."""
    seconds: float = 0.0
    resident: str = ""
    """Fingerprint of what lies in the engine's memory now, equal among engines of one layout."""
    layout: str = ""
    """How the engine lays weights out (fused, sharded, quantised); resident fingerprints compare within one only."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Where `seconds` went: wire, load, proof."""


def tensor_fingerprint(array: np.ndarray) -> str:
    """xxh3-128 of an array's bytes in C order, hexadecimal."""
    import numpy as np
    import xxhash

    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def combined_fingerprint(tensors: Iterable[TensorInfo]) -> str:
    """One fingerprint of names, dtypes, shapes and bytes, in name order: swapped names or a wrong dtype change it."""
    import xxhash

    digest = xxhash.xxh3_128()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{tensor.name} {tensor.dtype} [{shape}] {tensor.fingerprint}\n".encode())
    return digest.hexdigest()


class WeightTransport(Configurable[OptionsT], Generic[OptionsT]):
    """Moves tensors of one version from a trainer to receivers."""

    kind: ClassVar[str] = "weight-transport"
    payloads: ClassVar[frozenset[str]] = frozenset({"full"})
    same_host: ClassVar[bool] = False
    live: ClassVar[bool] = False
    """Nothing is stored: `send` only describes, and receivers take the tensors while the sender runs `transfer`."""

    @abstractmethod
    def send(self, version: Version, payload: Payload, base: str, tensors: Tensors, location: str) -> Manifest:
        """Write (name, bytes-like array, dtype) of a version under `location`; bf16 travels as uint16 bits.

        `tensors` are always whole. A delta is against the last version this instance sent, which `base` names;
        ValueError where it is not that one. A live transport only reads them, to say in the manifest what will come.
        """

    def transfer(self, manifest: Manifest, tensors: Tensors, receivers: int, wait_s: float) -> int:
        """live: hand the manifest's tensors, bucket by bucket, to the receivers that come until `receivers` are there
        or `wait_s` is over; returns how many took all of them. One that stalls is cut off, the others go on."""
        raise NotImplementedError

    @abstractmethod
    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        """Yield tensors in manifest order, whole and checked against their fingerprints; ValueError on a difference.

        A delta yields only those that changed, made from the receiver's own: `resident` gives the present bytes.
        An array may be reused for the next tensor where `live`: copy what is to be kept.
        """

    @abstractmethod
    def release(self, manifest: Manifest) -> None:
        """Free what `send` wrote."""
