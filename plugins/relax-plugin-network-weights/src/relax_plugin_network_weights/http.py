# SPDX-License-Identifier: Apache-2.0
"""The `http` transport: the sender's process keeps versions in files without names, and serves them to remote hosts.

A receiver copies a version in buckets to a file without a name, and reads this file as the file transports do. So
neither side holds a second model in memory, and an engine can generate while a version arrives.

The server supports byte ranges, and gives each file an unguessable path. A client that knows the path may read the file
and stop its serving. Requests are never logged. Files have no names, so the system deletes them when the process ends.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
import secrets
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar

import numpy as np
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.options import Options
from relax_core.api.weights import Manifest, Payload, Resident, TensorInfo, Tensors, Version, WeightTransport
from relax_core.tensor_files.safetensors_file import MAX_HEADER_BYTES
from relax_core.tensor_files.transport import FileTransport

STOP_POLL_S = 0.05
"""Seconds between two checks of a server for its stop request."""
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class AnonymousFile:
    """An open file whose name is removed; the system deletes the file when this object is freed."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        path.unlink()
        self.path = Path(f"/dev/fd/{descriptor}")
        """Path at which this process can open the file while this object exists."""


class FileServer:
    """An HTTP server of files without names; it runs from its creation until `stop`."""

    def __init__(self, host: str, port: int, silence_s: float) -> None:
        self._files: dict[str, AnonymousFile] = {}
        handler = type("Handler", (_Handler,), {"files": self._files, "timeout": silence_s})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise InfrastructureError(
                f"weights.port: can't listen on {host}:{port} ({error.strerror}); name a free port, or 0 for any"
            ) from error
        self.address = f"http://{host}:{self._server.server_address[1]}"
        # `stop` waits until the current poll ends
        threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="weights-http", daemon=True
        ).start()

    def serve(self, file: AnonymousFile) -> str:
        """Serve a file from now on; return the secret path under which clients can get it."""
        secret = secrets.token_urlsafe(32)
        self._files[secret] = file
        return secret

    def forget(self, secret: str) -> bool:
        """Stop serving a file; return False if it was not served. Running requests continue to their end."""
        return self._files.pop(secret, None) is not None

    def stop(self) -> None:
        self._files.clear()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a receiver that disconnects or falls silent; the receiver reports the error itself."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    files: dict[str, AnonymousFile]

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
        """Log nothing: paths are secrets."""


def _reachable(host: str) -> str:
    try:
        anywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        anywhere = not host.strip()
    if anywhere:
        raise ValueError("name the sender's own address, which receivers can reach")
    return host


Host = Annotated[str, AfterValidator(_reachable)]


class HttpOptions(Options):
    """Options of the HTTP transport. It does not encrypt weights, so use it only between trusted hosts."""

    host: Host = "127.0.0.1"
    """Address of the sender's host that receivers can reach; the default serves receivers on the same host only."""
    port: NonNegativeInt = Field(0, le=65535)
    """Port of the sender's server; 0: any free port."""
    bucket_mb: PositiveInt = 32
    """Size in MiB of one range request; a receiver holds this much in memory."""
    silence_s: PositiveFloat = 30.0
    """Seconds without a byte after which a receiver's load fails and the server drops the connection."""
    spool: str = ""
    """Directory on a receiver's host with room for one version; empty: the system's temporary directory."""


class Http(FileTransport, WeightTransport[HttpOptions]):
    """A transport of version files over HTTP."""

    same_host: ClassVar[bool] = False

    def __init__(self, options: HttpOptions | None = None) -> None:
        super().__init__(options)
        self._server: FileServer | None = None
        self._placing: AnonymousFile | None = None
        self._whole: dict[str, AnonymousFile] = {}
        """Last full version by model, the base of the first delta."""

    # -- the sender ---------------------------------------------------------------------------------------------

    def send(self, version: Version, payload: Payload, base: str, tensors: Tensors, location: str) -> Manifest:
        if self._server is None:
            self._server = FileServer(self.options.host, self.options.port, self.options.silence_s)
            weakref.finalize(self, self._server.stop)
        manifest = super().send(version, payload, base, tensors, location)
        file, self._placing = self._placing, None
        if file is None:
            raise RuntimeError(f"{version}: send wrote no file, so there is nothing to serve")
        if payload != "delta":
            self._whole[version.model] = file
        return replace(manifest, location=self._server.address, secret=self._server.serve(file))

    def _placed(self, path: Path) -> Path:
        self._placing = AnonymousFile(path)
        return self._placing.path

    def release(self, manifest: Manifest) -> None:
        """Stop serving a version, also if a different process serves it; ignore errors if that process is gone."""
        if self._server is not None and self._server.forget(manifest.secret):
            return
        with (
            closing(self._connection(manifest)) as connection,
            suppress(OSError, http.client.HTTPException),
        ):
            connection.request("DELETE", f"/{manifest.secret}")
            connection.getresponse().read()

    # -- a receiver ---------------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        try:
            spool = tempfile.TemporaryFile(prefix="relax-weights-", dir=self.options.spool or None)  # noqa: SIM115
        except OSError as error:
            fix = "name a directory that receivers can write to"
            raise ConfigError("weights.spool", self.options.spool or tempfile.gettempdir(), fix) from error
        with spool:
            self._fetch(manifest, spool)
            # the file has no name, so the system deletes it with the last array that maps it
            yield from super().receive(replace(manifest, location=f"/dev/fd/{spool.fileno()}"), resident)

    def _fetch(self, manifest: Manifest, spool: IO[bytes]) -> None:
        """Copy a version in buckets to the spool file. Raises InfrastructureError if the sender is gone."""
        bucket, done, size = memoryview(bytearray(self.options.bucket_mb << 20)), 0, 1
        with closing(self._connection(manifest)) as connection:
            try:
                while done < size:
                    got, size = _range(connection, manifest, done, bucket)
                    spool.write(bucket[:got])
                    done += got
                spool.flush()
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise InfrastructureError(
                    f"{manifest.version}: got {done} bytes from {manifest.location}, then {reason}; "
                    "the sender is gone or silent, or the spool directory is full"
                ) from error

    def _connection(self, manifest: Manifest) -> http.client.HTTPConnection:
        if not manifest.location.startswith("http://") or not manifest.secret:
            raise ValueError(f"{manifest.version}: {manifest.location!r} is not an address of an http transport")
        return http.client.HTTPConnection(manifest.location.removeprefix("http://"), timeout=self.options.silence_s)


def _range(
    connection: http.client.HTTPConnection, manifest: Manifest, begin: int, bucket: memoryview
) -> tuple[int, int]:
    """Fill a bucket with the file's bytes from `begin` on; return the number of bytes read and the file's size."""
    headers = {"Range": f"bytes={begin}-{begin + len(bucket) - 1}"}
    connection.request("GET", f"/{manifest.secret}", headers=headers)
    answer = connection.getresponse()
    if answer.status == http.client.NOT_FOUND:
        answer.read()
        raise InfrastructureError(f"{manifest.version}: gone from {manifest.location}; ask for the newest version")
    size = int((answer.getheader("Content-Range") or "").rpartition("/")[2] or 0)
    most = 2 * manifest.size_bytes + MAX_HEADER_BYTES
    if answer.status != http.client.PARTIAL_CONTENT or not 0 < size <= most:
        raise ValueError(
            f"{manifest.version}: {manifest.location} answered {answer.status} with a size of {size} bytes"
        )
    want, got = min(len(bucket), size - begin), 0
    while got < want and (read := answer.readinto(bucket[got:want])):
        got += read
    if got < want:
        raise http.client.IncompleteRead(b"", want - got)
    return got, size
