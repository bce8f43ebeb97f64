# SPDX-License-Identifier: Apache-2.0
"""Published weights: a manifest of what a version is, a transport that moves it, a receipt of what arrived."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.version import Version

if TYPE_CHECKING:
    import numpy as np

ReceiptLevel = Literal["wire", "resident", "behaviour"]
Payload = Literal["full", "delta", "lora"]


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
class Manifest:
    """What one version is, tensor by tensor."""

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

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receiver's proof: the fingerprint of what it really loaded."""

    receiver: str
    version: Version
    level: ReceiptLevel
    fingerprint: str
    seconds: float = 0.0


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

    @abstractmethod
    def send(
        self,
        version: Version,
        payload: Payload,
        base: str,
        tensors: Iterable[tuple[str, np.ndarray, str]],
        location: str,
    ) -> Manifest:
        """Write (name, bytes-like array, dtype) of a version under `location`; bf16 travels as uint16 bits."""

    @abstractmethod
    def receive(self, manifest: Manifest) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        """Tensors in manifest order, checked against their fingerprints; raises ValueError on a difference."""

    @abstractmethod
    def release(self, manifest: Manifest) -> None:
        """Free what `send` wrote."""
