# SPDX-License-Identifier: Apache-2.0
"""Communication between the ranks of one trainer: the process group, sums of tensors, and exchange of small facts.

Ranks send tensors and JSON, never pickle. When a rank is lost, every collective call raises InfrastructureError. A
trainer with a single rank sends nothing. Sharding of weights is in `sharding.py`.
"""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from relax_core.api import ConfigError, InfrastructureError, TrainerSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LOOPBACK = "127.0.0.1"
BUCKET = 2**24
"""Elements of one all-reduce: enough to use the network well, few compared with the gradients."""


def backend(device: torch.device) -> str:
    """Return torch's name of what carries collectives: gloo on the CPU, nccl as well where ranks compute on GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


class Ranks:
    """The process group of a trainer, as one rank sees it; torch allows one per process."""

    def __init__(self, spec: TrainerSpec, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size, self._device = spec.rank, spec.world_size, device
        if self.size == 1:
            return
        with self.meeting("start"):
            self._store = _store(spec, timedelta(seconds=timeout_s))
            dist.init_process_group(
                backend(device), store=self._store, rank=self.rank,
                world_size=self.size, timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
            self._check_devices()

    @property
    def first(self) -> bool:
        """True on the rank that writes and publishes."""
        return self.rank == 0

    def tell(self, fact: Any) -> list[Any]:
        """Send a fact (JSON data) to all ranks; return the facts of all ranks, in the order of ranks."""
        if self.size == 1:
            return [fact]
        own = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        longest = max(int(length) for length in lengths)
        said = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(said, torch.nn.functional.pad(own, (0, longest - len(own))))
        return [json.loads(bytes(text[: int(n)].tolist())) for text, n in zip(said, lengths, strict=True)]

    def add_up(self, tensors: Sequence[Tensor], among: DeviceMesh | None = None) -> None:
        """Replace each tensor by its sum over all ranks, or over the ranks of `among`; sums are equal bit for bit.

        Tensors are sent in flat buckets of about `BUCKET` elements.
        """
        group = None if among is None else among.get_group()
        for bucket in _buckets(tensors) if self.size > 1 else ():
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            for tensor, total in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    @contextmanager
    def meeting(self, call: str) -> Iterator[None]:
        """Raise InfrastructureError for a communication error in the block, which means that another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _of_the_wire(error):
                raise
            why = str(error).strip().splitlines()[0]
            raise InfrastructureError(
                f"trainer rank {self.rank} of {self.size} lost another rank in {call} ({why}); resume from a checkpoint"
            ) from error

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _check_devices(self) -> None:
        """Raise ConfigError if two ranks share a GPU; nccl would fail later, with an obscure error."""
        if self._device.type != "cuda":
            return
        own = f"{socket.gethostname()} {torch.cuda.get_device_properties(self._device).uuid}"
        if len(set(self.tell(own))) < self.size:
            fix = "give each rank a GPU (placement.actor.gpus_per_rank = 1), or set fewer ranks"
            raise ConfigError("placement.actor.ranks", f"{self.size} ranks that share a GPU", fix)


class _Member(Protocol):
    ranks: Ranks


M = TypeVar("M", bound=_Member)
P = ParamSpec("P")
R = TypeVar("R")


def collective_call(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Wrap a method in which ranks communicate, so that a lost rank raises InfrastructureError."""

    @functools.wraps(method)
    def call(self: M, *args: P.args, **named: P.kwargs) -> R:
        with self.ranks.meeting(method.__name__):
            return method(self, *args, **named)

    return call  # type: ignore[return-value]  # mypy names the wrapper's first parameter


def _store(spec: TrainerSpec, timeout: timedelta) -> Store:
    """Return the store through which ranks connect.

    Rank 0 listens on the host of `rendezvous` only; by default torch would listen on every interface of the machine.
    """
    host, _, port = spec.rendezvous.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError("rendezvous", repr(spec.rendezvous), "several ranks need an address host:port")
    listening = None
    if host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    if spec.rank == 0:
        listening = socket.create_server((host, int(port))).detach()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), spec.world_size, spec.rank == 0, timeout=timeout, master_listen_fd=listening
    )


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _of_the_wire(error: RuntimeError) -> bool:
    """Return True for a communication error. gloo raises plain RuntimeErrors, which only their text identifies."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
