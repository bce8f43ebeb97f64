# SPDX-License-Identifier: Apache-2.0
"""A server of files in a thread of its own: one unguessable path a file, byte ranges, nothing else.

Whoever knows a path may read the file and end its being served. Nothing of a request is ever logged. The files have no
names, so that server and files end with the process, however it ends.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import weakref
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from relax_core.api.errors import InfrastructureError

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Nameless:
    """A file whose name was taken away; it is gone when nobody holds this any more."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        path.unlink()
        self.path = Path(f"/dev/fd/{descriptor}")
        """As long as it is held, it can be opened here."""


class FileServer:
    """Serves until it is stopped."""

    def __init__(self, host: str, port: int, silence_s: float) -> None:
        self._files: dict[str, Nameless] = {}
        handler = type("Handler", (_Handler,), {"files": self._files, "timeout": silence_s})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise InfrastructureError(
                f"weights.port: can't listen on {host}:{port} ({error.strerror}); name a free port, or 0 for any"
            ) from error
        self.address = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="weights-http", daemon=True).start()

    def serve(self, file: Nameless) -> str:
        """The path under which it can be had."""
        secret = secrets.token_urlsafe(32)
        self._files[secret] = file
        return secret

    def forget(self, secret: str) -> bool:
        """Those who read it now read it to its end. Whether it was there."""
        return self._files.pop(secret, None) is not None

    def stop(self) -> None:
        self._files.clear()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A receiver that hung up or fell silent; it knows itself."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    files: dict[str, Nameless]

    def do_GET(self) -> None:
        wanted, held = _RANGE.fullmatch(self.headers.get("Range", "")), self.files.get(self.path[1:])
        if held is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        with held.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin, end = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
            if begin >= end:
                self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            self._answer(HTTPStatus.PARTIAL_CONTENT, end - begin, f"bytes {begin}-{end - 1}/{size}")
            self.wfile.flush()
            self.connection.sendfile(file, begin, end - begin)

    def do_DELETE(self) -> None:
        known = self.files.pop(self.path[1:], None)
        self._answer(HTTPStatus.OK if known else HTTPStatus.NOT_FOUND)

    def _answer(self, status: HTTPStatus, length: int = 0, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def version_string(self) -> str:
        return "relax"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base's name)
        """Paths are secrets."""
