# SPDX-License-Identifier: Apache-2.0
"""Rendezvous for transfers of live weights: receivers join through a key-value store that the sender's process serves.

A receiver draws a number, writes a hello and waits for its assignment, which the sender writes when a transfer starts.
The manifest's secret is the prefix of all keys. Values are JSON, so received data is never executed.
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
    """The part of the store with this version's keys."""
    number: int
    gpu: str

    def assign(self, terms: dict[str, Any]) -> None:
        self.keys.set(f"assignment/{self.number}", json.dumps(terms))

    def store(self) -> Any:
        """Return the store through which sender and receiver connect their pair."""
        return _prefix_store(self.keys, f"pair/{self.number}")


class Rendezvous:
    """The sender's side of the rendezvous, open until the sender's process ends."""

    def __init__(self, host: str, port: int, silence_s: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.host = host
        try:  # listen at this address only: by default TCPStore listens on every interface
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
        """Create a secret and the keys that it prefixes; each sending of a version has its own secret."""
        secret = secrets.token_hex(16)
        self._versions[secret], self._seen[secret] = _prefix_store(self._store, secret), 0
        return secret

    def admit(self, manifest: Manifest, receivers: int, wait_s: float) -> list[Receiver]:
        """Wait until `receivers` receivers have joined, at most `wait_s` seconds; return those that have joined."""
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
        """Return the number of receivers that report within `wait_s` seconds that the whole version has arrived."""
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
        """Close a version: receivers that wait for it or join later raise RetryLater and ask for the newest version."""
        if keys := self._versions.pop(manifest.secret, None):
            keys.set("over", "{}")
            del self._seen[manifest.secret]


@dataclass(frozen=True)
class ReceiverAssignment:
    """The sender's terms of a transfer to one receiver."""

    keys: Any
    number: int
    host: str
    """Address of the receiver at which the sender reaches it."""
    backend: str
    bucket_bytes: int
    silence_s: float

    def store(self) -> Any:
        return _prefix_store(self.keys, f"pair/{self.number}")

    def leave(self, took: bool) -> None:
        """Report that the whole version has arrived, or that it has not; ignore errors if the sender is gone."""
        with suppress(RuntimeError):
            self.keys.set(f"{'took' if took else 'gone'}/{self.number}", "{}")


def join(manifest: Manifest, gpu: str, patience_s: float, silence_s: float) -> ReceiverAssignment:
    """Join the sender and wait for the assignment.

    Raises RetryLater if no transfer starts within `patience_s` seconds or the version is closed. Raises
    InfrastructureError if the sender is gone.
    """
    host, _, port = manifest.location.removeprefix("tcp://").rpartition(":")
    if not manifest.location.startswith("tcp://") or not port.isdigit() or not manifest.secret:
        raise ValueError(f"{manifest.version}: {manifest.location!r} is not an address of a collective transport")
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
                raise RetryLater(f"{manifest.version}: no longer offered; ask for the newest version")
            if time.monotonic() > deadline:
                keys.set(f"gone/{number}", "{}")
                raise RetryLater(f"{manifest.version}: no transfer began within {patience_s:.0f} s; ask for it again")
            time.sleep(_POLL_S)
        return ReceiverAssignment(keys, number, own, **json.loads(keys.get(f"assignment/{number}")))


def _own_address(host: str, port: int, silence_s: float) -> str:
    """Return the address of the interface that leads to the sender; raise InfrastructureError if the sender is gone."""
    try:
        with socket.create_connection((host, port), timeout=silence_s) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InfrastructureError(
            f"can't reach a weight sender at {host}:{port} ({error}); the sender is gone"
        ) from error


def _prefix_store(store: Any, name: str) -> Any:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(name, store)


@contextmanager
def _sender_gone(what: str) -> Iterator[None]:
    """Raise InfrastructureError instead of torch's errors for a lost connection, which have several types."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, InfrastructureError):
            raise
        raise InfrastructureError(f"{what}: the sender does not answer ({error}), so it is gone or hangs") from error
