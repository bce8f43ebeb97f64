# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of live weights: receivers join their sender through keys in a store that the sender's process serves.

A receiver draws a number, says who it is and waits for its assignment, which the sender gives when it has time. Keys lie
under the manifest's secret, values are JSON: nothing that arrives is run. It moves no weights.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from relax_core.api.errors import InfrastructureError, RetryLater
from relax_core.api.weights import Manifest

_POLL_S = 0.01


@dataclass(frozen=True, eq=False)
class Receiver:
    """A receiver that has joined, as the sender sees it."""

    keys: Any
    """The store's part of this version."""
    number: int
    gpu: str

    def assign(self, terms: dict[str, Any]) -> None:
        self.keys.set(f"assignment/{self.number}", json.dumps(terms))

    def store(self) -> Any:
        """Give the store in which the two of them find each other."""
        return _prefix_store(self.keys, f"pair/{self.number}")


class Rendezvous:
    """The sender's end, open as long as its process lives."""

    def __init__(self, host: str, port: int, silence_s: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.host = host
        try:  # a socket of this address only: a store of its own choice would listen on every interface
            listener = socket.create_server((host, port))
        except OSError as error:
            raise InfrastructureError(
                f"weights.port: can't listen on {host}:{port} ({error.strerror}); name a free port, or 0 for any"
            ) from error
        self.port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=silence_s),
        )  # fmt: skip
        self._versions: dict[str, Any] = {}
        self._seen: dict[str, int] = {}

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def new_secret(self) -> str:
        """Open the keys of a version; one that is sent again under the same name gets others."""
        secret = secrets.token_hex(16)
        self._versions[secret], self._seen[secret] = _prefix_store(self._store, secret), 0
        return secret

    def admit(self, manifest: Manifest, receivers: int, wait_s: float) -> list[Receiver]:
        """Give the receivers that have joined as soon as there are `receivers`, or after `wait_s`."""
        keys, joined, deadline = self._versions[manifest.secret], list[Receiver](), time.monotonic() + wait_s
        while True:
            joined += self._arrivals(manifest.secret)
            if len(joined) >= receivers or time.monotonic() >= deadline:
                return [receiver for receiver in joined if not keys.check([f"gone/{receiver.number}"])]
            time.sleep(_POLL_S)

    def _arrivals(self, secret: str) -> Iterator[Receiver]:
        keys = self._versions[secret]
        while keys.check([f"hello/{self._seen[secret] + 1}"]):
            self._seen[secret] += 1
            hello = json.loads(keys.get(f"hello/{self._seen[secret]}"))
            yield Receiver(keys, self._seen[secret], str(hello["gpu"]))

    def took(self, joined: Collection[Receiver], wait_s: float) -> int:
        """Count the receivers that say within `wait_s` that all has arrived."""
        deadline, waiting, took = time.monotonic() + wait_s, set(joined), 0
        while waiting and time.monotonic() < deadline:
            for receiver in list(waiting):
                done = receiver.keys.check([f"took/{receiver.number}"])
                if done or receiver.keys.check([f"gone/{receiver.number}"]):
                    waiting.remove(receiver)
                    took += done
            time.sleep(_POLL_S if waiting else 0)
        return took

    def close(self, manifest: Manifest) -> None:
        """End a version: receivers that wait for it or come later are told to ask for the newest."""
        if keys := self._versions.pop(manifest.secret, None):
            keys.set("over", "{}")
            del self._seen[manifest.secret]


@dataclass(frozen=True)
class ReceiverAssignment:
    """The sender's answer to a receiver: how it will be served."""

    keys: Any
    number: int
    host: str
    """Address of this side, as the sender reaches it."""
    backend: str
    bucket_bytes: int
    silence_s: float

    def store(self) -> Any:
        return _prefix_store(self.keys, f"pair/{self.number}")

    def leave(self, took: bool) -> None:
        """Say whether all has arrived; a sender that is gone needs no telling."""
        with suppress(RuntimeError):
            self.keys.set(f"{'took' if took else 'gone'}/{self.number}", "{}")


def join(manifest: Manifest, gpu: str, patience_s: float, silence_s: float) -> ReceiverAssignment:
    """Join and wait until the sender has time. RetryLater where it does not come, or has something newer."""
    host, _, port = manifest.location.removeprefix("tcp://").rpartition(":")
    if not manifest.location.startswith("tcp://") or not port.isdigit() or not manifest.secret:
        raise ValueError(f"{manifest.version}: {manifest.location!r} is no address of a collective transport")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with _sender_gone(str(manifest.version)):
        own = _own_address(host, int(port), silence_s)
        timeout = timedelta(seconds=silence_s)
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        keys = _prefix_store(store, manifest.secret)
        number = keys.add("numbers", 1)
        keys.set(f"hello/{number}", json.dumps({"gpu": gpu}))
        deadline = time.monotonic() + patience_s
        while not keys.check([f"assignment/{number}"]):
            if keys.check(["over"]):
                raise RetryLater(f"{manifest.version}: no longer handed out; come again for the newest version")
            if time.monotonic() > deadline:
                keys.set(f"gone/{number}", "{}")
                raise RetryLater(f"{manifest.version}: nobody hands it out now (waited {patience_s:.0f} s); come again")
            time.sleep(_POLL_S)
        return ReceiverAssignment(keys, number, own, **json.loads(keys.get(f"assignment/{number}")))


def _own_address(host: str, port: int, silence_s: float) -> str:
    """Find the address of the interface that leads to the sender; fails at once where nobody listens there."""
    try:
        with socket.create_connection((host, port), timeout=silence_s) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InfrastructureError(f"nobody hands weights out at {host}:{port} ({error}); the sender is gone") from error


def _prefix_store(store: Any, name: str) -> Any:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(name, store)


@contextmanager
def _sender_gone(what: str) -> Iterator[None]:
    """Turn the several RuntimeErrors by which torch tells a lost connection into one error."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, InfrastructureError):
            raise
        raise InfrastructureError(f"{what}: its sender does not answer, it is gone or hangs ({error})") from error
