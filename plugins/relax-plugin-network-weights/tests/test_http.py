# SPDX-License-Identifier: Apache-2.0
"""The http transport: conformance, and what a network and a disk can do to it."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from relax_plugin_network_weights.http import Http, HttpOptions

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.weights import Manifest, Version
from relax_core.testing.weight_transport import WeightTransportSuite, some_tensors

ONE = Version("actor", 0, 1)
SMALL = HttpOptions(bucket_mb=1, silence_s=60.0)


class TestHttp(WeightTransportSuite):
    component = "http"
    options = {"bucket_mb": 1, "silence_s": 60.0}


def large() -> list[tuple[str, np.ndarray, str]]:
    """Several buckets, and none of them ends where a tensor does."""
    return [*some_tensors(), ("large", np.random.default_rng(1).integers(0, 255, 3_300_001, np.uint8), "U8")]


def asked(manifest: Manifest, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(manifest.location.removeprefix("http://"), timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_version_of_several_buckets_arrives(tmp_path: Path) -> None:
    sender = Http(SMALL)
    manifest = sender.send(ONE, "full", "", large(), str(tmp_path))
    for (_, want, _), (_, have) in zip(large(), Http(SMALL).receive(manifest), strict=True):
        assert np.array_equal(want, have)


def test_only_the_unguessable_path_is_served(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("x")
    sender = Http(SMALL)
    manifest = sender.send(ONE, "full", "", some_tensors(), str(tmp_path))
    for path in ("/", "/private", f"/{manifest.version}.safetensors", f"/{manifest.secret}/../private", "/.."):
        assert asked(manifest, path) == (404, b"")
    assert asked(manifest, "/private", "DELETE") == (404, b"")
    assert asked(manifest, f"/{manifest.secret}", Range="bytes=0-3")[0] == 206
    assert asked(manifest, f"/{manifest.secret}", Range="bytes=999999-9999999")[0] == 416
    assert len(manifest.secret) > 40 and manifest.location.startswith("http://127.0.0.1:")


def test_the_secret_is_never_shown_or_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sender = Http(SMALL)
    manifest = sender.send(ONE, "full", "", some_tensors(), str(tmp_path))
    list(Http(SMALL).receive(manifest))
    asked(manifest, f"/{manifest.secret}", Range="bytes=0-3")
    with pytest.raises(ValueError) as wrong:
        list(Http(SMALL).receive(replace(manifest, fingerprint="0")))
    sender.release(manifest)
    with pytest.raises(InfrastructureError) as gone:
        list(Http(SMALL).receive(manifest))
    shown = "".join([*capfd.readouterr(), str(wrong.value), str(gone.value), repr(manifest)])
    assert manifest.secret not in shown
    assert not any(manifest.secret.encode() in path.read_bytes() for path in tmp_path.rglob("*"))


def test_the_server_and_its_files_end_with_the_sender(tmp_path: Path) -> None:
    sender = Http(SMALL)
    manifest = sender.send(ONE, "full", "", some_tensors(), str(tmp_path))
    alive = weakref.ref(sender)
    del sender
    assert alive() is None, "it is in a cycle, and stays until the collector runs"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InfrastructureError, match="the sender is gone"):
        list(Http(SMALL).receive(manifest))
    Http(SMALL).release(manifest)


SENDER = """
import os, signal, sys
from relax_core.rpc import messages
from relax_core.api.weights import Version
from relax_core.testing.weight_transport import some_tensors
from relax_plugin_network_weights.http import Http
sender = Http()
manifest = sender.send(Version("actor", 0, 1), "full", "", some_tensors(), sys.argv[1])
sys.stdout.buffer.write(messages.encode(manifest))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_neither_server_nor_files(tmp_path: Path) -> None:
    from relax_core.rpc import messages

    done = subprocess.run([sys.executable, "-c", SENDER, str(tmp_path)], capture_output=True, check=False, timeout=200)
    with pytest.raises(InfrastructureError, match="gone"):
        list(Http(SMALL).receive(messages.decode(done.stdout)))
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InfrastructureError, match=rf"weights\.port: .*{port}.*name a free port"):
            Http(HttpOptions(port=port)).send(ONE, "full", "", some_tensors(), str(tmp_path))


def test_a_spool_that_is_not_a_directory_is_reported(tmp_path: Path) -> None:
    sender = Http(SMALL)
    manifest = sender.send(ONE, "full", "", some_tensors(), str(tmp_path))
    with pytest.raises(ConfigError, match=r"weights\.spool: got .*nowhere"):
        list(Http(HttpOptions(spool=str(tmp_path / "nowhere"))).receive(manifest))


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (b"", InfrastructureError, "got 0 bytes .* the sender is gone or silent"),
        (
            b"HTTP/1.1 206 x\r\nContent-Length: 99\r\nContent-Range: bytes 0-98/99\r\n\r\nabc",
            InfrastructureError,
            "got 0 bytes .* the sender is gone or silent",
        ),
        (
            b"HTTP/1.1 206 x\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/999999999999\r\n\r\nx",
            ValueError,
            "999999999999",
        ),
    ],
    ids=["silent", "half", "too much"],
)
def test_a_silent_truncating_or_oversized_server_is_refused(
    tmp_path: Path, answer: bytes, error: type[Exception], said: str
) -> None:
    manifest = Http(SMALL).send(ONE, "full", "", some_tensors(), str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer, args=(server, answer))
        thread.start()
        here = replace(manifest, location=f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(error, match=said):
            list(Http(HttpOptions(silence_s=0.5)).receive(here))
        thread.join()


def _answer(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(answer)
        if not answer:
            connection.recv(1)  # returns when the receiver gives up
