# SPDX-License-Identifier: Apache-2.0
"""The ranks of one trainer as one of them sees them: how they meet, add up tensors and tell each other small facts.

What travels is tensors and JSON, never pickle. A rank that is lost ends every meeting as InfrastructureError. It shards
nothing (`sharding.py`), and on one rank it does nothing.
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

from relax_core.api import ConfigError, InfrastructureError, TrainerSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LOOPBACK = "127.0.0.1"
BUCKET = 2**24
"""Elements of one all-reduce: large enough for the wire, small beside the gradients."""


class Ranks:
    """A process group while it lasts; torch has one a process."""

    def __init__(self, spec: TrainerSpec, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size, self._device = spec.rank, spec.world_size, device
        if self.size == 1:
            return
        with self.meeting("start"):
            self._store = _store(spec, timedelta(seconds=timeout_s))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=self._store, rank=self.rank,
                world_size=self.size, timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
            self._check_devices()

    @property
    def first(self) -> bool:
        """The rank that writes and publishes."""
        return self.rank == 0

    def tell(self, fact: Any) -> list[Any]:
        """Exchange plain data: return every rank's fact, in the order of ranks."""
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
        """Each becomes its sum over the ranks, or `among` some of them, in a few flat buckets; all get the same bits."""
        group = None if among is None else among.get_group()
        for bucket in _buckets(tensors) if self.size > 1 else ():
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    @contextmanager
    def meeting(self, call: str) -> Iterator[None]:
        """Turn the communication error that tells that another rank is gone into an infrastructure error."""
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
        """nccl fails late and darkly where two ranks have one GPU."""
        if self._device.type != "cuda":
            return
        own = f"{socket.gethostname()} {torch.cuda.get_device_properties(self._device).uuid}"
        if len(set(self.tell(own))) < self.size:
            fix = "set placement.actor.gpus_per_rank = 1 on as many GPUs as ranks, or fewer ranks"
            raise ConfigError("placement.actor.ranks", f"{self.size} ranks that share a GPU", fix)


class _Member(Protocol):
    ranks: Ranks


M, P, R = TypeVar("M", bound=_Member), ParamSpec("P"), TypeVar("R")


def collective_call(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """A method in which ranks may meet."""

    @functools.wraps(method)
    def call(self: M, *args: P.args, **named: P.kwargs) -> R:
        with self.ranks.meeting(method.__name__):
            return method(self, *args, **named)

    return call


def _store(spec: TrainerSpec, timeout: timedelta) -> dist.TCPStore:
    """Make the store where ranks find each other; torch alone would listen on every interface of the machine."""
    host, _, port = spec.rendezvous.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError("rendezvous", repr(spec.rendezvous), "several ranks meet at host:port")
    listening = None
    if host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    if spec.rank == 0:
        listening = socket.create_server((host, int(port))).detach()
    return dist.TCPStore(host, int(port), spec.world_size, spec.rank == 0, timeout=timeout, master_listen_fd=listening)


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _of_the_wire(error: RuntimeError) -> bool:
    """gloo has no type of its own."""
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
