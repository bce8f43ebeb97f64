# SPDX-License-Identifier: Apache-2.0
"""Published weights: versions, manifests that describe them, transports that move them, and receipts of receivers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, NamedTuple, TypeAlias

from relax_core.api.component import Configurable, OptionsT

if TYPE_CHECKING:
    import numpy as np


class Version(NamedTuple):
    """A version of a model's weights: incarnation and completed steps; ordered by incarnation, then step."""

    model: str
    incarnation: int
    """Number of the trainer's incarnation; each restore of the trainer from a checkpoint starts a new incarnation."""
    step: int

    def __str__(self) -> str:
        return f"{self.model}@{self.incarnation}.{self.step}"

    def next(self) -> Version:
        return self._replace(step=self.step + 1)

    def supersedes(self, other: Version) -> bool:
        """Return True if a receiver with `other` may load this version: same model, and not older."""
        return self.model == other.model and self[1:] >= other[1:] and self.incarnation >= other.incarnation


ReceiptLevel = Literal["wire", "resident", "behaviour"]
Payload = Literal["full", "delta", "lora"]
Resident: TypeAlias = "Callable[[str], np.ndarray]"
"""A function from a Hugging Face name to the receiver's current array, in the dtype of the manifest."""
Tensors: TypeAlias = "Iterable[tuple[str, np.ndarray, str]]"
"""(name, array, safetensors name of the dtype) of each tensor."""
PLAIN = "hugging-face"
"""Layout of an engine that holds exactly the published tensors in memory, with the manifest's fingerprint."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The description of one tensor, under its Hugging Face or peft name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype as in safetensors: F32, BF16, F16, ..."""
    fingerprint: str
    """xxh3-128 of the bytes, hexadecimal."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Canary:
    """A test sequence with the trainer's log-probs; an engine with different log-probs does not have these weights."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """[tokens] log-prob of each token given the tokens before it, from logits / temperature; the first is 0."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of one version of the weights, tensor by tensor."""

    version: Version
    payload: Payload
    tensors: tuple[TensorInfo, ...]
    location: str
    """Path or address of the tensors, as the transport needs it."""
    base: str = ""
    """The version that a delta builds on, or the fingerprint of the model that adapters belong to; empty for `full`."""
    fingerprint: str = ""
    """`combined_fingerprint` of all tensors."""
    unchanged: tuple[str, ...] = ()
    """Names of tensors with the same bytes as in the last version; an update that leaves all unchanged is an error."""
    wire_bytes: int = 0
    """Number of bytes to transfer, for a delta far fewer than `size_bytes`; 0: as many as `size_bytes`."""
    canary: Canary | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """phase of the sender (gather, hash, write) -> seconds."""
    live: bool = False
    """True: tensors are not stored. Receivers get them during `transfer`; late receivers call `WeightService.want`."""
    secret: str = field(default="", repr=False)
    """Password for receivers; never shown, logged or written to disk."""

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def sent(self) -> tuple[TensorInfo, ...]:
        """Return the tensors to transfer: of a delta, only the changed tensors. `tensors` always lists all."""
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
    """A receiver's proof that it has loaded a version."""

    receiver: str
    version: Version
    level: ReceiptLevel
    """Strongest check that passed: received bytes (wire), engine memory (resident), canary log-probs (behaviour)."""
    fingerprint: str
    """`combined_fingerprint` of the tensors that arrived; equals `Manifest.wire_fingerprint` if all are correct."""
    seconds: float = 0.0
    resident: str = ""
    """Fingerprint of the weights in the engine's memory; equal for all engines of one layout."""
    layout: str = ""
    """Name of the engine's memory layout (fused, sharded, quantised); `resident` is comparable only within a layout."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Parts of `seconds`: wire, load, proof."""


def tensor_fingerprint(array: np.ndarray) -> str:
    """Return the xxh3-128 hash of an array's bytes in C order, hexadecimal."""
    import numpy as np
    import xxhash

    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def combined_fingerprint(tensors: Iterable[TensorInfo]) -> str:
    """Hash names, dtypes, shapes and bytes of tensors, in name order, into one fingerprint."""
    import xxhash

    digest = xxhash.xxh3_128()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{tensor.name} {tensor.dtype} [{shape}] {tensor.fingerprint}\n".encode())
    return digest.hexdigest()


class WeightTransport(Configurable[OptionsT], Generic[OptionsT]):
    """A way to move a version's tensors from a trainer to its receivers."""

    kind: ClassVar[str] = "weight-transport"
    payloads: ClassVar[frozenset[str]] = frozenset({"full"})
    same_host: ClassVar[bool] = False
    """True: sender and receivers must run on one host."""
    live: ClassVar[bool] = False
    """True: `send` stores nothing and only makes the manifest; receivers get the tensors during `transfer`."""

    @abstractmethod
    def send(self, version: Version, payload: Payload, base: str, tensors: Tensors, location: str) -> Manifest:
        """Write a version's tensors under `location`; bfloat16 travels as its bits in uint16.

        `tensors` are always complete. A delta builds on the last version that this instance sent; raise ValueError if
        `base` is a different version. A live transport only reads the tensors, to describe them in the manifest.
        """

    def transfer(self, manifest: Manifest, tensors: Tensors, receivers: int, wait_s: float) -> int:
        """Send the tensors to receivers that join within `wait_s`; only for live transports.

        Wait until `receivers` have joined or `wait_s` is over. Cut off a receiver that stalls, and continue with the
        others. Return how many receivers got all tensors.
        """
        raise NotImplementedError

    @abstractmethod
    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        """Yield tensors in manifest order, complete and checked; raise ValueError for a wrong fingerprint.

        For a delta, yield only the changed tensors, computed from the receiver's current bytes, which `resident`
        returns. A live transport may reuse an array for the next tensor, so copy an array to keep it.
        """

    @abstractmethod
    def release(self, manifest: Manifest) -> None:
        """Delete the data that `send` wrote for this manifest."""
