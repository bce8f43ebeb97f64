# SPDX-License-Identifier: Apache-2.0
"""A server of files in a thread of its own: one unguessable path a file, byte ranges, nothing else.

Whoever knows a path may read the file and end its being served. Nothing of a request is ever logged. It ends with its
process, and takes the files along.
"""

from __future__ import annotations

import re
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from relax_core.api.errors import InfrastructureError

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class FileServer:
    """Serves until it is stopped."""

    def __init__(self, host: str, port: int, silence_s: float) -> None:
        self._files: dict[str, Path] = {}
        handler = type("Handler", (_Handler,), {"files": self._files, "timeout": silence_s})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise InfrastructureError(
                f"weights.port: can't listen on {host}:{port} ({error.strerror}); name a free port, or 0 for any"
            ) from error
        self.address = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="weights-http", daemon=True).start()

    def serve(self, path: Path) -> str:
        """The path under which it can be had; a file that is written anew gets a new one."""
        for secret in [secret for secret, known in self._files.items() if known == path]:
            del self._files[secret]
        secret = secrets.token_urlsafe(32)
        self._files[secret] = path
        return secret

    def forget(self, secret: str) -> bool:
        """Remove a file; whether it was there."""
        return forget(self._files, secret)

    def stop(self) -> None:
        for secret in list(self._files):
            self.forget(secret)
        self._server.shutdown()
        self._server.server_close()


def forget(files: dict[str, Path], secret: str) -> bool:
    """Those who read it now read it to its end."""
    path = files.pop(secret, None)
    if path is not None:
        path.unlink(missing_ok=True)
    return path is not None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A receiver that hung up or fell silent; it knows itself."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    files: dict[str, Path]

    def do_GET(self) -> None:
        wanted, path = _RANGE.fullmatch(self.headers.get("Range", "")), self.files.get(self.path[1:])
        try:
            file = path.open("rb") if path else None
        except OSError:
            file = None
        if file is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        with file:
            size = file.seek(0, 2)
            begin, end = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
            if begin >= end:
                self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            self._answer(HTTPStatus.PARTIAL_CONTENT, end - begin, f"bytes {begin}-{end - 1}/{size}")
            self.wfile.flush()
            self.connection.sendfile(file, begin, end - begin)

    def do_DELETE(self) -> None:
        known = forget(self.files, self.path[1:])
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
