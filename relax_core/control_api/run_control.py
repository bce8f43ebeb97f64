# SPDX-License-Identifier: Apache-2.0
"""Changes of one run, asked through the files of its run directory.

`RunControl` gives a `Book` what the files say, and sends its requests to the run. The verbs of the command line use it
directly, and the control API keeps its book in the run directory.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from relax_core.api.errors import InfrastructureError, RelaxError
from relax_core.api.run_commands import Command, Profile, ScaleRequest
from relax_core.api.trainer import Trainer
from relax_core.control.stages import resumable_step
from relax_core.control_api.operations import Book, ControlOperation, Facts, Refused
from relax_core.registry.catalogue import Catalogue
from relax_core.views.answers import scaling_of
from relax_core.views.follower import EvaluationCount, ProfileCount
from relax_core.views.run import RunView, health, pause_reason, readable_documents

POLL_S = 0.2


class RunControl:
    """The changes that callers ask of one run. Its methods read and write files; threads may call them."""

    def __init__(self, view: RunView, book: Book | None = None) -> None:
        self.view, self.book = view, book or Book()
        self._evaluations, self._profiles = EvaluationCount(view), ProfileCount(view)
        self._lock = threading.RLock()

    def facts(self) -> Facts:
        """Read what the run's files say now."""
        with readable_documents(self.view):
            state, status = health(self.view, time.time()), self.view.status()
            return Facts(
                state.state, state.ended or state.state == "lost", int(status.get("step", 0)),
                resumable_step(self.view.path) or 0, pause_reason(status), int(status.get("pid") or 0),
                self._evaluations.sets, self._evaluations.now(), self._profiles.now(),
                scaling_of(self.view),
            )  # fmt: skip

    def ask(self, command: Command, key: str) -> tuple[ControlOperation, bool]:
        """Return the operation of a key, and True if the run got the command just now. Raises Refused."""
        with self._lock:
            if isinstance(command, Profile):
                check_profiles(self.view)
            known = self.book.number
            operation, asks = self.book.ask(command, key, self.facts(), time.time())
            if self.book.number != known:
                self.keep()  # first, so that a caller who repeats the request after a crash gets this operation
            if asks:
                self._send(operation)
            return operation, asks

    def settle(self) -> None:
        """Update the open operations from the run's files. Send a request again if the run has a new process, which lost it."""
        with self._lock:
            before = dict(self.book.operations)
            if not any(one.state == "requested" for one in before.values()):
                return
            for operation in self.book.settle(self.facts(), time.time()):
                self._send(operation)
            if self.book.operations != before:
                self.keep()

    def change(self, command: Command, wait_s: float) -> dict[str, Any]:
        """Ask for a change and wait until it is done; return the operation as JSON data.

        Raises Refused, or InfrastructureError if it fails or is not done within `wait_s`.
        """
        asked, _ = self.ask(command, key_of(command))

        def look() -> dict[str, Any]:
            self.settle()
            return asdict(self.book.operations[asked.id])

        name = self.view.name
        return until_done(asdict(asked), look, wait_s, POLL_S, name, f"it stays requested; see `relax why {name}`")

    def keep(self) -> None:
        """Keep the book, of which an operation has changed."""

    def _send(self, operation: ControlOperation) -> None:
        match operation.command:
            case ScaleRequest() as request:
                for pool in operation.pools:
                    self.view.send(replace(request, pool=pool))
            case Profile(steps):
                done = self._profiles.now() - operation.profiles
                self.view.send(Profile(max(steps - done, 1)))
            case command:
                self.view.send(command)


def check_profiles(view: RunView) -> None:
    """Raise Refused if the run's trainer can't record profiles. A trainer that is not installed here is not checked."""
    chosen = view.config.get("trainer") or {}
    name = str(chosen.get("name", "") if isinstance(chosen, Mapping) else chosen)
    try:
        catalogue = Catalogue.load([str(path) for path in view.config.get("plugins", ())])
        kind = cast(type[Trainer], catalogue.target("trainer", name))
    except RelaxError:
        return
    if not kind.profiles:
        raise Refused(409, "trainer.name", name, "this trainer can't record profiles: start a run with another one")


def key_of(command: Command) -> str:
    """Return the idempotency key of a command, a new one if the command has none."""
    return command.key if isinstance(command, ScaleRequest) else uuid.uuid4().hex


def until_done(
    operation: dict[str, Any], look: Callable[[], dict[str, Any]], wait_s: float, poll_s: float, where: str, later: str
) -> dict[str, Any]:
    """Look at an operation until it is done, and return it.

    Raises InfrastructureError if it fails, or is not done within `wait_s`; the error then ends with `later`.
    """
    deadline = time.monotonic() + wait_s
    while operation["state"] == "requested":
        if time.monotonic() > deadline:
            said = f" ({operation['detail']})" if operation["detail"] else ""
            raise InfrastructureError(
                f"{where}: {operation['action']} is not done within {wait_s:.0f} s{said}; {later}"
            )
        time.sleep(poll_s)
        operation = look()
    if operation["state"] == "failed":
        raise InfrastructureError(f"{where}: {operation['action']} failed: {operation['detail']}")
    return operation
