# SPDX-License-Identifier: Apache-2.0
"""The client of the control API, for commands with `--address`, and the token of both ends."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.files import read_text
from relax_core.api.run_commands import NAMES, Command, ScaleRequest
from relax_core.control_api.run_control import key_of, until_done

TOKEN = "RELAX_TOKEN"
SHORTEST = 16
UNIX = "unix:"
CALL_S, POLL_S = 30.0, 0.5
FIX = "start `relax serve RUN` there, or correct the address"
TRIES = 5
"""Attempts of one call; repeating a change is safe, since its key stays the same."""


def read_token(file: Path | None) -> str:
    """Return the token from a file that only its owner can read, else from `RELAX_TOKEN`. Raises ConfigError."""
    if file is not None:
        field, make = "--token-file", f"(umask 077; openssl rand -hex 32 > {file})"
        try:
            mode, token = file.stat().st_mode, read_text(file).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(field, f"{file} ({error})", f"make the file: {make}") from error
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(field, f"{file}, which other users can read", f"chmod 600 {file}")
    else:
        field, make, token = TOKEN, f"export {TOKEN}=$(openssl rand -hex 32)", os.environ.get(TOKEN, "").strip()
    if len(token) < SHORTEST:
        got = f"a token of {len(token)} characters" if token else "nothing"
        raise ConfigError(field, got, f"give a random token of at least {SHORTEST} characters: {make}")
    return token


class Answered(ConfigError):
    """The refusal of a request by the control API. `refused` is the field that it names."""

    def __init__(self, where: str, refused: str, got: str, fix: str) -> None:
        super().__init__(f"{where}: {refused}", got, fix)
        self.refused = refused


def route(command: Command) -> tuple[str, Mapping[str, Any]]:
    """Return the route of the control API for a command, and the fields of the request's body."""
    if not isinstance(command, ScaleRequest):
        return f"/{NAMES[type(command)]}", asdict(command)
    if command.engine:
        return f"/engines/{command.engine}/drain", {}
    if command.cancel:
        return f"/operations/{command.cancel}/cancel", {}
    if command.address:
        return "/engines/join", {"address": command.address}
    if command.node:
        return "/engines/drain", {"node": command.node}
    return "/engines", {"pool": command.pool, "target": command.target, "keep_partial": command.keep_partial}


class ControlClient:
    """Calls to the control API of one run."""

    def __init__(self, address: str, token: str) -> None:
        """`address`: `http://HOST:PORT`, `HOST:PORT` or `unix:PATH`."""
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise ConfigError("--address", "no package httpx", "pip install 'relax-core[control]'") from error
        self.address = address
        self._errors = httpx.TransportError
        unix = address.removeprefix(UNIX) if address.startswith(UNIX) else None
        url = "http://run" if unix else address if "://" in address else f"http://{address}"
        headers = {"authorization": f"Bearer {token}"}
        try:
            self._http = httpx.Client(
                base_url=url, transport=httpx.HTTPTransport(uds=unix) if unix else None, headers=headers, timeout=CALL_S
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError("--address", address, "give http://HOST:PORT or unix:PATH") from error

    def get(self, path: str) -> dict[str, Any]:
        """Return the document of a route."""
        return self._call("GET", path, {})

    def ask(self, command: Command, *, dry_run: bool = False) -> dict[str, Any]:
        """Ask for a change once; return the operation, or what a dry run answers. Raises ConfigError."""
        path, fields = route(command)
        more = {"dry_run": True} if dry_run else {}
        return self._call("POST", path, {"idempotency-key": key_of(command)}, {**fields, **more})

    def change(self, command: Command, wait_s: float) -> dict[str, Any]:
        """Ask for a change and wait until it is done; return the operation.

        Raises ConfigError if the run refuses it, InfrastructureError if it fails or is not done within `wait_s`.
        """
        asked = self.ask(command)
        later = f"it stays requested as operation {asked['id']}; see `relax why --address {self.address}`"
        return until_done(asked, lambda: self.get(f"/operations/{asked['id']}"), wait_s, POLL_S, self.address, later)

    def _call(
        self, method: str, path: str, headers: Mapping[str, str], fields: Mapping[str, Any] | None = None
    ) -> dict[str, object]:
        for left in reversed(range(TRIES)):
            try:
                answer = self._http.request(method, path, headers=dict(headers), json=dict(fields) if fields else None)
                break
            except self._errors as error:
                if not left:
                    raise InfrastructureError(f"{self.address} does not answer ({error}); {FIX}") from error
                time.sleep(POLL_S)
        document = self._document(answer.content)
        if answer.is_success:
            return document
        raise self._refusal(document, answer.status_code)

    def lines(self, path: str, query: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the lines of a stream as they come, empty lines left out. Raises ConfigError or InfrastructureError."""
        begun = False
        try:
            with self._http.stream("GET", path, params=dict(query)) as answer:
                if not answer.is_success:
                    raise self._refusal(self._document(answer.read()), answer.status_code)
                rest = b""
                for part in answer.iter_bytes():
                    begun = True
                    *lines, rest = (rest + part).split(b"\n")
                    yield from filter(None, lines)
        except self._errors as error:
            what = "ended the stream" if begun else "does not answer"
            fix = "repeat the command" if begun else FIX
            raise InfrastructureError(f"{self.address} {what} ({error}); {fix}") from error

    def _document(self, content: bytes) -> dict[str, object]:
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(content)
            if isinstance(document, dict):
                return document
        raise ConfigError("--address", self.address, "give the address of `relax serve`: this one gives no JSON object")

    def _refusal(self, document: Mapping[str, Any], status: int) -> Answered:
        wrong = [str(document.get(name, "")) for name in ("field", "got", "fix")]
        return Answered(self.address, wrong[0] or f"{status}", *wrong[1:])
