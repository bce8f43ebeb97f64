# SPDX-License-Identifier: Apache-2.0
"""A process group of a sender and one receiver, over which bytes are sent in buckets of a fixed size.

Every wait has a deadline, and a failure ends only the pair in which it occurs. `payload.py` cuts tensors into bytes.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any, Self

import numpy as np

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.weights import Manifest


def on_gpu() -> str:
    """Return the id of the GPU that this process uses; empty if it uses none."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class Pair:
    """A process group of two processes: rank 0 sends, rank 1 receives."""

    def __init__(self, group: Any, rank: int, device: str) -> None:
        self._group, self._peer, self._device = group, 1 - rank, device

    @classmethod
    def connect(cls, store: Any, rank: int, backend: str, host: str, timeout_s: float) -> Self | None:
        """Connect to the peer; return None if the peer does not connect in time."""
        try:
            if backend == "nccl":
                return cls(_nccl(store, rank, timeout_s), rank, "cuda")
            return cls(_gloo(store, rank, host, timeout_s), rank, "cpu")
        except RuntimeError as error:
            if isinstance(error, ConfigError):
                raise
            return None

    def send(self, bucket: np.ndarray) -> Sending | None:
        """Start sending a bucket; its memory must not change until it is sent. Return None if the peer is gone."""
        import torch

        tensor = torch.from_numpy(bucket).to(self._device)
        try:
            return Sending(self._group.send([tensor], self._peer, 0), tensor)
        except RuntimeError:
            return None

    def receive(self, bucket: np.ndarray) -> Receiving:
        """Start receiving into the memory of a bucket."""
        import torch

        here = torch.from_numpy(bucket)
        there = here if self._device == "cpu" else torch.empty_like(here, device=self._device)
        try:
            return Receiving(self._group.recv([there], self._peer, 0), there, here)
        except RuntimeError as error:  # `wait` raises it, after earlier buckets are read
            return Receiving(_Lost(error), there, here)

    def close(self) -> None:
        """Close the connection; the peer notices at once."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class Sending:
    """A bucket that is being sent; this object keeps the bucket's memory alive."""

    def __init__(self, work: Any, tensor: Any) -> None:
        self._work, self._tensor = work, tensor

    def done(self, timeout_s: float) -> bool:
        """Wait until the bucket is sent; return False if the peer does not take the bucket in time."""
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError:
            return False
        return True


class _Lost:
    """A receive operation that could not start; `wait` raises its error."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, _: timedelta) -> None:
        raise self._error


class Receiving:
    """A bucket that is being received."""

    def __init__(self, work: Any, there: Any, here: Any) -> None:
        self._work, self._there, self._here = work, there, here

    def wait(self, timeout_s: float) -> None:
        """Wait until the bucket has arrived. Raises RuntimeError if it does not arrive in time."""
        self._work.wait(timedelta(seconds=timeout_s))
        if self._there is not self._here:
            self._here.copy_(self._there)


class Incoming:
    """The received bytes of one transfer, in order; the next bucket arrives while the current bucket is read."""

    def __init__(self, pair: Pair, manifest: Manifest, bucket_bytes: int, silence_s: float) -> None:
        self._pair, self._version, self._silence_s = pair, manifest.version, silence_s
        self._left = manifest.wire_bytes
        self._memory = [np.empty(min(bucket_bytes, self._left), np.uint8) for _ in range(2)]
        self._coming: deque[tuple[Receiving, np.ndarray]] = deque()
        self._bucket = np.empty(0, np.uint8)
        self._expect()

    def read_into(self, target: np.ndarray) -> None:
        """Fill all of `target` [bytes]."""
        done = 0
        while done < len(target):
            if not len(self._bucket):
                self._next()
            part = self._bucket[: len(target) - done]
            target[done : done + len(part)] = part
            self._bucket = self._bucket[len(part) :]
            done += len(part)

    def _next(self) -> None:
        if not self._coming:
            raise ValueError(f"{self._version}: the tensors have more bytes than the manifest says; publish again")
        receiving, self._bucket = self._coming.popleft()
        self._expect()
        try:
            receiving.wait(self._silence_s)
        except RuntimeError as error:
            raise InfrastructureError(
                f"{self._version}: the sender is gone, or dropped this receiver ({error}); load again"
            ) from error

    def _expect(self) -> None:
        size = min(len(self._memory[0]), self._left)
        if size:
            memory = self._memory[0][:size]
            self._memory.reverse()
            self._left -= size
            self._coming.append((self._pair.receive(memory), memory))


def _gloo(store: Any, rank: int, host: str, timeout_s: float) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = timedelta(seconds=timeout_s), 1
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Any, rank: int, timeout_s: float) -> Any:
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        raise ConfigError("weights.backend", "nccl", "this torch has no NCCL; use gloo or auto")
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return torch.distributed.ProcessGroupNCCL(store, rank, 2, options)
