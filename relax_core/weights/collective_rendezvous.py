# SPDX-License-Identifier: Apache-2.0
"""Where receivers of live weights come together with their sender: keys in a store that the sender's process serves.

A receiver draws a number, says who it is and waits for a seat; the sender seats those who came when it has time. Keys lie
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

_LOOK_S = 0.01


@dataclass(frozen=True, eq=False)
class Receiver:
    """A receiver at the door, as the sender sees it."""

    shelf: Any
    """The store's part of this version."""
    number: int
    gpu: str

    def seat(self, terms: dict[str, Any]) -> None:
        self.shelf.set(f"seat/{self.number}", json.dumps(terms))

    def store(self) -> Any:
        """Where the two of them find each other."""
        return _shelf(self.shelf, f"pair/{self.number}")


class Rendezvous:
    """The sender's end, open as long as its process lives."""

    def __init__(self, host: str, port: int, silence_s: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.host = host
        listener = _listen(host, port)
        self.port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=silence_s),
        )  # fmt: skip
        self._shelves: dict[str, Any] = {}
        self._seen: dict[str, int] = {}

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def new_secret(self) -> str:
        """A version's own keys; also one that is sent again under the same name has others."""
        secret = secrets.token_hex(16)
        self._shelves[secret], self._seen[secret] = _shelf(self._store, secret), 0
        return secret

    def admit(self, manifest: Manifest, receivers: int, wait_s: float) -> list[Receiver]:
        """Those who stand at the door as soon as there are `receivers`, or after `wait_s`."""
        shelf, guests, deadline = self._shelves[manifest.secret], list[Receiver](), time.monotonic() + wait_s
        while True:
            guests += self._newcomers(manifest.secret)
            if len(guests) >= receivers or time.monotonic() >= deadline:
                return [guest for guest in guests if not shelf.check([f"gone/{guest.number}"])]
            time.sleep(_LOOK_S)

    def _newcomers(self, secret: str) -> Iterator[Receiver]:
        shelf = self._shelves[secret]
        while shelf.check([f"hello/{self._seen[secret] + 1}"]):
            self._seen[secret] += 1
            hello = json.loads(shelf.get(f"hello/{self._seen[secret]}"))
            yield Receiver(shelf, self._seen[secret], str(hello["gpu"]))

    def took(self, guests: Collection[Receiver], wait_s: float) -> int:
        """How many of them say within `wait_s` that all has arrived."""
        deadline, waiting, took = time.monotonic() + wait_s, set(guests), 0
        while waiting and time.monotonic() < deadline:
            for guest in list(waiting):
                done = guest.shelf.check([f"took/{guest.number}"])
                if done or guest.shelf.check([f"gone/{guest.number}"]):
                    waiting.remove(guest)
                    took += done
            time.sleep(_LOOK_S if waiting else 0)
        return took

    def close(self, manifest: Manifest) -> None:
        """A version that is handed out no more: whoever comes for it, or stands there, is sent for a newer one."""
        if shelf := self._shelves.pop(manifest.secret, None):
            shelf.set("over", "{}")
            del self._seen[manifest.secret]


@dataclass(frozen=True)
class ReceiverAssignment:
    """What a receiver was given: how it will be served."""

    shelf: Any
    number: int
    host: str
    """Of this side, as the sender reaches it."""
    backend: str
    bucket_bytes: int
    silence_s: float

    def store(self) -> Any:
        return _shelf(self.shelf, f"pair/{self.number}")

    def leave(self, took: bool) -> None:
        """Say whether all has arrived; a sender that is gone needs no telling."""
        with suppress(RuntimeError):
            self.shelf.set(f"{'took' if took else 'gone'}/{self.number}", "{}")


def join(manifest: Manifest, gpu: str, patience_s: float, silence_s: float) -> ReceiverAssignment:
    """Stand at the door until the sender has time. ComeAgain where it does not come, or has something newer."""
    host, _, port = manifest.location.removeprefix("tcp://").rpartition(":")
    if not manifest.location.startswith("tcp://") or not port.isdigit() or not manifest.secret:
        raise ValueError(f"{manifest.version}: {manifest.location!r} is no door of a collective transport")
    with _sender_gone(str(manifest.version)):
        own = _own_address(host, int(port), silence_s)
        shelf = _shelf(_visit(host, int(port), silence_s), manifest.secret)
        number = shelf.add("numbers", 1)
        shelf.set(f"hello/{number}", json.dumps({"gpu": gpu}))
        return ReceiverAssignment(shelf, number, own, **_terms(shelf, number, manifest, patience_s))


def _terms(shelf: Any, number: int, manifest: Manifest, patience_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + patience_s
    while not shelf.check([f"seat/{number}"]):
        if shelf.check(["over"]):
            raise RetryLater(f"{manifest.version}: no longer handed out; come again for the newest version")
        if time.monotonic() > deadline:
            shelf.set(f"gone/{number}", "{}")
            raise RetryLater(f"{manifest.version}: nobody hands it out now (waited {patience_s:.0f} s); come again")
        time.sleep(_LOOK_S)
    return dict(json.loads(shelf.get(f"seat/{number}")))


def _listen(host: str, port: int) -> socket.socket:
    """A socket of this address only: a store of its own choice would listen on every interface."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise InfrastructureError(
            f"weights.port: can't listen on {host}:{port} ({error.strerror}); name a free port, or 0 for any"
        ) from error


def _visit(host: str, port: int, silence_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=silence_s))


def _own_address(host: str, port: int, silence_s: float) -> str:
    """Of the interface that leads to the sender; told at once where nobody listens there."""
    try:
        with socket.create_connection((host, port), timeout=silence_s) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InfrastructureError(f"nobody hands weights out at {host}:{port} ({error}); the sender is gone") from error


def _shelf(store: Any, name: str) -> Any:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(name, store)


@contextmanager
def _sender_gone(what: str) -> Iterator[None]:
    """torch tells a lost connection as a RuntimeError of several kinds."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, InfrastructureError):
            raise
        raise InfrastructureError(f"{what}: its sender does not answer, it is gone or hangs ({error})") from error
