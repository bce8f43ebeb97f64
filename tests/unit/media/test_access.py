# SPDX-License-Identifier: Apache-2.0
"""Limits of sources of media, against a real HTTP server and real links: only what is allowed by name is reached."""

import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from relax_core.api.errors import ConfigError, SourceUnavailable
from relax_core.media.access import MAX_REDIRECTS, SourceAccess
from relax_core.media.source import EmbeddedMedia, check_source, read_source, restricted, shown

CLOSED = SourceAccess((), ())


class Handler(BaseHTTPRequestHandler):
    """Answers by path; `/to?URL` redirects."""

    def do_GET(self):
        self.server.asked.append((self.headers["Host"], self.path))
        path, _, rest = self.path.partition("?")
        if path in ("/to", "/loop"):
            self.send_response(302)
            self.send_header("Location", rest or "/loop")
            self.end_headers()
        elif path == "/flaky" and len([1 for _, asked in self.server.asked if asked == "/flaky"]) <= 2:
            self.send_error(503)
        elif path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"abc")
        elif path in ("/endless", "/slow", "/slow-header"):
            self._for_ever(path)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"abc")

    def _for_ever(self, path):
        part, pause_s = (bytes(1 << 16), 0.0) if path == "/endless" else (b"x", 0.02)
        try:
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX-A: " if path == "/slow-header" else b"HTTP/1.0 200 OK\r\n\r\n")
            while not self.server.over.wait(pause_s):
                self.wfile.write(part)
        except OSError:
            return

    def log_message(self, *args): ...


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.over = [], threading.Event()
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.over.set()
    made.shutdown()
    thread.join()
    made.server_close()


@contextmanager
def names(monkeypatch, **addresses):
    """Let names of hosts, dots for underscores, resolve to these addresses: each call takes the next, the last one stays."""
    real, calls = socket.getaddrinfo, []

    def resolve(host, port, *args, **keys):
        known = addresses.get(str(host).replace(".", "_"))
        if known is None:
            return real(host, port, *args, **keys)
        calls.append(host)
        return real(known.pop(0) if len(known) > 1 else known[0], port, *args, **keys)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolve)
        yield calls


def test_a_url_is_off_unless_its_host_is_allowed_by_name(server):
    with pytest.raises(
        ConfigError, match=r"data.media.allowed_hosts: got http.*/a.png, whose host is not allowed; set"
    ):
        CLOSED.fetch(f"{server.url}/a.png", 100)
    assert server.asked == []
    assert SourceAccess(["127.0.0.1"]).fetch(f"{server.url}/a.png", 100) == b"abc"
    assert SourceAccess(["127.0.0.0/8"]).fetch(f"{server.url}/a%20b?c=d", 100) == b"abc"
    assert server.asked[-1] == (f"127.0.0.1:{server.server_port}", "/a%20b?c=d")


def test_names_match_whole_and_below_a_star_and_nothing_else():
    access = SourceAccess(["images.example.org", "*.cdn.example"])
    for url in ("http://images.example.org/x", "https://IMAGES.example.org.:8443/x", "http://a.b.cdn.example/x"):
        check_source(url, access)
    for url in (
        "http://example.org/x", "http://evilimages.example.org/x", "http://cdn.example/x", "http://evilcdn.example/x",
        "http://images.example.org@evil.example/x", "http://images.example.org.evil.example/", "http://2130706433/",
        "http://[::1]/x", "http://evil.example/#images.example.org",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"data.media.allowed_hosts"):
            check_source(url, access)
    for url in (
        "ftp://images.example.org/x",
        "gopher://images.example.org",
        "http://",
        "http://[broken",
        "http://a:b:c/",
    ):
        with pytest.raises(ConfigError, match=r"data.train"):
            check_source(url, access)


def test_possible_secrets_of_a_url_are_not_shown(server):
    url = f"http://me:word@127.0.0.1:{server.server_port}/cut?signature=abc#x"
    for access in (CLOSED, SourceAccess(["127.0.0.1"])):
        with pytest.raises(
            (ConfigError, SourceUnavailable), match=rf"http://127.0.0.1:{server.server_port}/cut\?\.\.\."
        ) as told:
            access.fetch(url, 100)
        assert "word" not in str(told.value) and "signature" not in str(told.value)
    assert shown(url) == f"http://127.0.0.1:{server.server_port}/cut?..."


REFUSED = (
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%lo", "fc00::1", "fec0::1",
    "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::7f00:1", "2001:db8::1",
)  # fmt: skip


def test_addresses_that_are_not_public_are_refused_unless_they_are_named():
    access = SourceAccess(["media.test"])
    assert [address for address in REFUSED if access._permits(address)] == []
    assert all(access._permits(address) for address in ("93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34"))
    assert SourceAccess(["10.0.0.0/8"])._permits("10.1.2.3") and not SourceAccess(["10.0.0.0/8"])._permits("11.0.0.256")


def test_an_allowed_name_leads_to_no_private_address_but_one_that_is_named(server, monkeypatch):
    url = f"http://media.test:{server.server_port}/a"
    with names(monkeypatch, media_test=["127.0.0.1"]):
        with pytest.raises(
            SourceUnavailable, match=r"media.test is at 127.0.0.1, which is not a public.*allowed_hosts"
        ):
            SourceAccess(["media.test"]).fetch(url, 100)
        assert server.asked == []
        assert SourceAccess(["media.test", "127.0.0.1"]).fetch(url, 100) == b"abc"
        assert server.asked == [(f"media.test:{server.server_port}", "/a")]


def test_a_name_that_changes_between_check_and_connection_changes_nothing(monkeypatch):
    reached = []

    def connect(address, timeout):
        reached.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with names(monkeypatch, media_test=["93.184.216.34", "127.0.0.1"]) as resolved:
        with pytest.raises(SourceUnavailable):
            SourceAccess(["media.test"]).fetch("http://media.test/a", 100)
        assert reached == [("93.184.216.34", 80)] and resolved == ["media.test"]
        with pytest.raises(SourceUnavailable, match="127.0.0.1, which is not a public"):
            SourceAccess(["media.test"]).fetch("http://media.test/a", 100)
        assert len(reached) == 1


def test_a_redirect_is_held_to_the_same_limits(server, monkeypatch):
    access = SourceAccess(["127.0.0.1", "metadata.test"])
    assert access.fetch(f"{server.url}/to?/a", 100) == b"abc"
    with names(monkeypatch, metadata_test=["169.254.169.254"]):
        for place, reason in {
            f"http://localhost:{server.server_port}/": "allowed_hosts: got http://localhost", "file:///etc/passwd": "http",
            "ftp://127.0.0.1/": "give a path", "http://metadata.test/": "metadata.test is at 169.254.169.254",
            "http://[::1]/": "allowed_hosts", "//10.0.0.1/": "allowed_hosts",
        }.items():  # fmt: skip
            server.asked.clear()
            with pytest.raises(SourceUnavailable, match=reason):
                access.fetch(f"{server.url}/to?{place}", 100)
            assert len(server.asked) == 1
    server.asked.clear()
    with pytest.raises(SourceUnavailable, match=f"more than {MAX_REDIRECTS} redirects"):
        access.fetch(f"{server.url}/loop", 100)
    assert len(server.asked) == MAX_REDIRECTS + 1


@pytest.mark.parametrize("path", ["slow", "slow-header"])
def test_an_answer_that_trickles_is_over_in_time(server, path):
    began = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"longer than data.media.fetch_timeout_s = 0.3 s"):
        SourceAccess(["127.0.0.1"], fetch_timeout_s=0.3).fetch(f"{server.url}/{path}", 1 << 30)
    assert time.monotonic() - began < 60


def test_an_answer_is_read_up_to_its_limit_and_a_truncated_one_is_refused(server):
    with restricted(SourceAccess(["127.0.0.1"]), 1000):
        with pytest.raises(ValueError, match="more than 1000 bytes") as refused:
            read_source(f"{server.url}/endless")
        assert not isinstance(refused.value, SourceUnavailable)
        with pytest.raises(SourceUnavailable, match="the body ends after 3 bytes"):
            read_source(f"{server.url}/cut")
        with pytest.raises(SourceUnavailable, match="HTTP status 503"):
            read_source(f"{server.url}/flaky")


@pytest.fixture
def folders(tmp_path):
    for name in ("data", "data/pictures", "secret", "data-not"):
        (tmp_path / name).mkdir()
    for name in ("data/pictures/a", "secret/a", "data-not/a"):
        (tmp_path / name).write_bytes(b"abc")
    (tmp_path / "secret" / "lines.jsonl").write_text(json.dumps({"image": {"bytes": "YWJj"}}) + "\n")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret" / "a")
    (tmp_path / "data" / "folder").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "inside").symlink_to(tmp_path / "data" / "pictures")
    return tmp_path


def test_files_are_read_only_below_allowed_folders_wherever_links_lead(folders):
    data, secret = folders / "data", folders / "secret"
    cell = str(EmbeddedMedia(str(secret / "lines.jsonl"), 0, ("image",)))
    good = [f"{data}/pictures/a", f"file://{data}/pictures/a", f"{data}/inside/a", f"{data}/pictures/../pictures/a"]
    bad = [
        f"{secret}/a", f"file://{secret}/a", f"file://localhost{secret}/a", f"{data}/../secret/a", f"{data}/link",
        f"{data}/folder/a", f"file://{data}/%2e%2e/secret/a", f"{folders}/data-not/a", "/etc/passwd", cell,
    ]  # fmt: skip
    for access in (SourceAccess((), [str(data)]), SourceAccess((), [f"{data}/inside/.."])):
        with restricted(access, 100):
            assert [read_source(source) for source in good] == [b"abc"] * len(good)
            for source in bad:
                with pytest.raises(
                    ValueError, match=r"data.media.allowed_folders: got .*outside of the allowed folders"
                ):
                    read_source(source)
                with pytest.raises(ConfigError):
                    check_source(source, access)
    with restricted(SourceAccess((), [str(data), str(secret)]), 100):
        assert [read_source(source) for source in (*bad[:7], cell)] == [b"abc"] * 8
    for source in ("file://other-host/a", "file://a"):
        with pytest.raises(ValueError, match="file:///absolute/path"):
            read_source(source)


def test_a_link_that_is_put_in_the_place_of_a_checked_file_leads_nowhere(folders, monkeypatch):
    picture, real = folders / "data" / "pictures" / "a", os.open

    def open_later(path, *args, **keys):
        if path == picture and not picture.is_symlink():
            picture.unlink()
            picture.symlink_to(folders / "secret" / "a")
        return real(path, *args, **keys)

    monkeypatch.setattr(os, "open", open_later)
    with pytest.raises(ConfigError, match="secret/a, outside of the allowed folders"):
        SourceAccess((), [str(folders / "data")]).read_file(picture, 100)
