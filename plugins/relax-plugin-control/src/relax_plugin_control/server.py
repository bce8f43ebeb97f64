# SPDX-License-Identifier: Apache-2.0
"""The server of the control API, and the command `relax serve`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from relax_core.api.errors import ConfigError
from relax_core.api.http_requests import HeadDeadline
from relax_core.cli.terminal import Run, TokenFile, say
from relax_core.runs import UNIX, RunView, WriterLock, open_run, read_token
from relax_plugin_control.app import RunApi, make_app

MAX_PORT = 65535


def listening(address: str, run: Path) -> tuple[socket.socket, str]:
    """Bind `HOST:PORT`, `unix:PATH`, or `unix` (a socket in the run directory); return the socket and its address.

    A Unix socket has mode 0600. Raises ConfigError.
    """
    if address == "unix":
        address = f"{UNIX}{run / 'control.sock'}"
    if address.startswith(UNIX):
        path = Path(address.removeprefix(UNIX))
        if path.is_socket():
            _remove_left(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
        except OSError as error:
            listener.close()
            fix = "name a new file with a path of at most 107 characters, in a folder that you can write"
            raise ConfigError("--listen", f"{path} ({error})", fix) from error
        return listener, address
    host, _, port = address.rpartition(":")
    fix = "give HOST:PORT, such as 127.0.0.1:8700, or unix, or unix:PATH"
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError("--listen", address, fix)
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
    except OSError as error:
        listener.close()
        raise ConfigError("--listen", f"{address} ({error})", "name a free port of this machine, or port 0") from error
    bound = listener.getsockname()
    return listener, f"http://{f'[{bound[0]}]' if ':' in host else bound[0]}:{bound[1]}"


def _remove_left(path: Path) -> None:
    """Delete the socket of a server that was killed. Raises ConfigError unless the system says that no process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass  # a full queue, or a socket of another user or kind
    raise ConfigError("--listen", f"{path}, on which another process listens", "name a new file, or stop that process")


class ControlServer:
    """The server of one run's control API. It holds a lock of the run, so that a run has at most one."""

    def __init__(self, view: RunView, address: str, token: str) -> None:
        """Bind the address; see `listening`. Raises ConfigError for it, and if another process serves the run."""
        self._lock = WriterLock(view.path / ".control-lock")
        try:
            self._listener, self.address = listening(address, view.path)
        except BaseException:
            self._lock.release()
            raise
        self._server = uvicorn.Server(uvicorn.Config(
            make_app(RunApi(view, token)), log_level="warning", access_log=False, http=HeadDeadline,
            timeout_graceful_shutdown=2,
        ))  # fmt: skip

    def run(self) -> None:
        """Serve until `stop`, or until the process is interrupted."""
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._listener.close()
            if self.address.startswith(UNIX):
                Path(self.address.removeprefix(UNIX)).unlink(missing_ok=True)
            self._lock.release()

    def stop(self) -> None:
        """Make `run` return; for another thread."""
        self._server.should_exit = True


def serve(
    run: Run = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT, unix:PATH, or unix for a socket in the run directory.")
    ] = "127.0.0.1:8700",
    token_file: TokenFile = None,
) -> None:
    """Serve the control API of a run until Ctrl-C: watch and change the run by HTTP.

    Every request needs the token, as `Authorization: Bearer TOKEN`. The page /docs lists the routes. The server reads the
    run directory, so it may run on any machine that has it, before and after the run too. It does not encrypt: to reach
    it from elsewhere, use a tunnel or a proxy with TLS.
    """
    view, token = open_run(run), read_token(token_file)
    server = ControlServer(view, listen, token)
    say(f"relax: {view.name} is served at {server.address}", err=True)
    server.run()
