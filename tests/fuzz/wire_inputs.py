# SPDX-License-Identifier: Apache-2.0
"""Weights, and the bytes that arrive at sockets: what engines, trainers and their children read."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from relax_core.api.weights import Manifest, Version, tensor_fingerprint
from relax_core.rpc import messages
from relax_core.rpc.connection import CALL, HEAD, HELLO, Connection
from relax_core.tensor_files.transport import Disk
from tests.fuzz.configuration_inputs import Files
from tests.fuzz.mutations import json_bytes, mutate_bytes


@cache
def versions() -> tuple[tuple[Manifest, bytes], ...]:
    """A full version and a delta on top of it, with their files."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk()

        def tensors(add: float) -> list[tuple[str, np.ndarray, str]]:
            return [("a", np.full((3, 4), add, np.float32), "F32"), ("b", np.arange(6, dtype=np.uint16), "BF16")]

        full = disk.send(Version("actor", 0, 1), "full", "", tensors(0.0), folder)
        delta = disk.send(Version("actor", 0, 2), "delta", str(full.version), tensors(1.0), folder)
        return tuple((manifest, Path(manifest.location).read_bytes()) for manifest in (full, delta))


def weights_input(random: Random) -> Files:
    manifest, body = random.choice(versions())
    told = messages.encode(manifest)
    if random.random() < 0.7:
        head = int.from_bytes(body[:8], "little")
        if random.random() < 0.5:
            text = json_bytes(json.loads(body[8 : 8 + head]), random)
            body = len(text).to_bytes(8, "little") + text + body[8 + head :]
        else:
            body = mutate_bytes(body, random)
    else:
        told = mutate_bytes(told, random)
    return {"manifest": told, "version.safetensors": body}


def feed_weights(folder: Path) -> None:
    """Receive a version from a file: what arrives without an error is what was sent, bit for bit."""
    try:
        told = messages.decode((folder / "manifest").read_bytes())
    except TypeError as error:  # a value that its type does not take; a connection answers any error
        raise ValueError(str(error)) from error
    if not isinstance(told, Manifest):
        raise ValueError("no manifest")
    manifest = replace(told, location=str(folder / "version.safetensors"))
    sent = {(info.name, info.fingerprint) for known, _ in versions() for info in known.tensors}
    resident = {"a": np.zeros((3, 4), np.float32), "b": np.arange(6, dtype=np.uint16)}
    for info, array in Disk().receive(manifest, lambda name: resident[name]):
        if told in [known for known, _ in versions()]:
            assert (info.name, info.fingerprint) in sent and tensor_fingerprint(array) == info.fingerprint


TOKEN = "a-token"


def frame(number: int, kind: int, body: bytes, arrays: tuple[bytes, ...] = ()) -> bytes:
    sizes = b"".join(len(one).to_bytes(8, "little") for one in arrays)
    return HEAD.pack(number, kind, len(arrays), len(body)) + sizes + body + b"".join(arrays)


def frames_input(random: Random) -> Files:
    large: list[Any] = []
    call = messages.encode(
        ["work", [{"a": np.zeros(5000)}, Version("actor", 0, 1), versions()[0][0], {1, 2}, 10**30]], large
    )
    hello = frame(1, HELLO, messages.encode([messages.PROTOCOL, TOKEN if random.random() < 0.6 else "x"]))
    calls = frame(2, CALL, call, tuple(bytes(one) for one in large))
    choice = random.random()
    if choice < 0.3:
        deep = random.choice((100, 600, 20_000))
        nested = random.choice((b"\x91" * deep + b"\x01", b"\xc7\xff\x01" * (deep // 3), _nested_extension(deep)))
        calls = frame(2, CALL, nested)
        hello = random.choice((hello, frame(1, HELLO, nested)))
    elif choice < 0.5:
        hello = frame(1, HELLO, mutate_bytes(messages.encode([messages.PROTOCOL, versions()[0][0]]), random))
    stream = hello + calls
    return {"stream": mutate_bytes(stream, random) if random.random() < 0.7 else stream}


def _nested_extension(depth: int) -> bytes:
    import msgpack

    body = b"\x01"
    for _ in range(min(depth, 600)):
        body = msgpack.packb(msgpack.ExtType(3, body))
    return bytes(body)


def feed_frames(folder: Path) -> None:
    """Send the bytes to a listening end: it answers or hangs up, keeps its loop, and shows nobody a fault of its own."""
    stream = (folder / "stream").read_bytes()
    faults: list[dict[str, Any]] = []

    async def work(method: str, args: Any) -> Any:
        return [method, args]

    async def served() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: faults.append(told))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = Connection(call=work, token=TOKEN)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=theirs)
        for at in range(0, len(stream), 1 << 16):
            try:
                await asyncio.get_running_loop().sock_sendall(ours, stream[at : at + (1 << 16)])
            except OSError:
                break
        for _ in range(8):
            await asyncio.sleep(0)
        ours.close()
        connection.close()
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(served())
    if faults:
        error = faults[0].get("exception")
        raise error if isinstance(error, BaseException) else AssertionError(faults[0]["message"])


REQUESTS = (
    b"GET /{secret} HTTP/1.1\r\nHost: a\r\nRange: bytes=0-99\r\nConnection: close\r\n\r\n",
    b"DELETE /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"GET /{secret} HTTP/1.0\r\nRange: bytes=99999999999999999999-9\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\nx",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
)
ANSWERS = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/10\r\nContent-Length: 10\r\n\r\n0123456789",
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/999999999999\r\nContent-Length: 10\r\n\r\n0123456789",
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-9/10\r\n\r\nffffffff\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
)


def http_input(random: Random) -> Files:
    name, seeds = random.choice((("request", REQUESTS), ("answer", ANSWERS)))
    body = random.choice(seeds)
    return {name: mutate_bytes(body, random) if random.random() < 0.85 else body}


def feed_http(folder: Path) -> None:
    """Send a request to the sender of the `http` transport, or answer a receiver's own."""
    if (folder / "request").exists():
        _ask((folder / "request").read_bytes())
    else:
        _answer((folder / "answer").read_bytes())


def _ask(request: bytes) -> None:
    import http.client

    from relax_plugin_network_weights.http import Http

    transport = Http()
    with tempfile.TemporaryDirectory() as spool:
        manifest = transport.send(Version("actor", 0, 1), "full", "", [("a", np.zeros(8, np.float32), "F32")], spool)
    host, port = manifest.location.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60.0) as asked:
        asked.settimeout(0.05)
        asked.sendall(request.replace(b"{secret}", manifest.secret.encode()))
        try:
            while asked.recv(1 << 16):
                pass
        except OSError:
            pass
    again = http.client.HTTPConnection(host, int(port), timeout=60.0)  # it serves others as before
    again.request("GET", "/unknown")
    assert again.getresponse().status == 404
    again.close()
    transport.release(manifest)


def _answer(answer: bytes) -> None:
    import threading

    from relax_plugin_network_weights.http import Http, HttpOptions

    with socket.create_server(("127.0.0.1", 0)) as server:

        def answered() -> None:
            taken, _ = server.accept()
            with taken:
                taken.settimeout(60.0)
                taken.recv(1 << 12)
                taken.sendall(answer)

        thread = threading.Thread(target=answered, daemon=True)
        thread.start()
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        manifest = replace(versions()[0][0], location=place, secret="x")
        transport = Http(HttpOptions(silence_s=0.2, bucket_mb=1))
        try:
            list(transport.receive(manifest))
        finally:
            thread.join(2.0)
