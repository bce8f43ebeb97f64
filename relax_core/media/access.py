# SPDX-License-Identifier: Apache-2.0
"""Limits on the hosts, addresses and folders that media sources may name, and reads within these limits.

Task files may be untrusted, so their URLs and paths reach only hosts and folders that the configuration allows. A URL
is fetched from the address that was checked, also after a redirect. A name that resolves differently a moment later
thus has no effect. A file is checked again after opening, when a link can no longer replace it. Proxy settings of the
environment are ignored, because a proxy would connect to unchecked addresses.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from relax_core.api.errors import ConfigError, SourceUnavailable

HOSTS, FOLDERS = "data.media.allowed_hosts", "data.media.allowed_folders"
FETCH_TIMEOUT_S = 20.0
MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""IPv6 addresses that a gateway translates to the IPv4 address in their last 32 bits."""
_READ_BYTES = 1 << 20
_WRITTEN = "/%:@!$&'()*+,;=~"
"""Characters of a URL that are sent unescaped."""

Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class SourceAccess:
    """The hosts and folders that media sources may name.

    Invariants:
    - Bytes of a URL come from an allowed host. Its address is public or itself allowed, also after a redirect.
    - Bytes of a file come from an allowed folder: its real path, with links followed, lies below the folder.
    """

    allowed_hosts: Sequence[str] = ()
    """Host names, `*.NAME` for all hosts below a name, IP addresses and networks. Listed addresses may be private."""
    allowed_folders: Sequence[str] | None = None
    """Folders or single files that may be read; None allows any file, for callers that name the files themselves."""
    fetch_timeout_s: float = FETCH_TIMEOUT_S
    """Seconds after which the fetch of a URL fails, redirects included."""

    @cached_property
    def _networks(self) -> list[IPv4Network | IPv6Network]:
        networks = []
        for host in self.allowed_hosts:
            with suppress(ValueError):  # the name of a host
                networks.append(ip_network(host, strict=False))
        return networks

    @cached_property
    def _roots(self) -> list[str] | None:
        return None if self.allowed_folders is None else [os.path.realpath(folder) for folder in self.allowed_folders]

    # -- files ----------------------------------------------------------------------------------------------------

    def check_file(self, path: str | Path) -> None:
        """Raise ConfigError unless a path, with its links followed, leads below an allowed folder."""
        real = os.path.realpath(path)
        if self._roots is None or any(real == root or real.startswith(root.rstrip("/") + "/") for root in self._roots):
            return
        leads = "" if real == os.path.abspath(path) else f", which leads to {real}"
        fix = "add a folder that contains it if it may be read; the folder of the data file is always allowed"
        raise ConfigError(FOLDERS, f"{path}{leads}, outside of the allowed folders", fix)

    def read_file(self, path: str | Path, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes of a file.

        Raises ConfigError (not allowed), ValueError (not a regular file) or SourceUnavailable (reading failed).
        """
        self.check_file(path)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or a device may never end
                raise ValueError(f"{path} is not a regular file")
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                    raise ValueError(f"{path} is not a regular file")
                self.check_file(f"/proc/self/fd/{opened.fileno()}")
                return opened.read(max_bytes + 1)
        except OSError as error:
            raise SourceUnavailable(f"{path} can't be read ({error.strerror or error})") from error

    # -- URLs -----------------------------------------------------------------------------------------------------

    def check_url(self, url: str) -> SplitResult:
        """Return the parts of an http(s) URL. Raises ConfigError unless its host is allowed, by name or by address."""
        try:
            parts = urlsplit(url)
            _ = parts.port
            host = _plain(parts.hostname or "")
        except ValueError as error:
            raise ConfigError("data.train", f"{shown_url(url)}, which is not a URL ({error})", "correct it") from error
        if parts.scheme not in _PORTS or not host:
            raise ConfigError("data.train", shown_url(url), "give a path, an http(s) URL or a data-URI")
        names = (_plain(allowed) for allowed in self.allowed_hosts)
        if any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in names):
            return parts
        address = _address(host)
        if address is None or not any(address in network for network in self._networks):
            fix = f'set [data.media] allowed_hosts = ["{host}"] to allow this host, or name a file'
            raise ConfigError(HOSTS, f"{shown_url(url)}, whose host is not allowed", fix)
        return parts

    def fetch(self, url: str, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes of a URL.

        Raises ConfigError if the URL is not allowed, and SourceUnavailable if it can't be fetched.
        """
        shown = shown_url(url)
        expired, deadline = threading.Event(), time.monotonic() + self.fetch_timeout_s
        guards: list[socket.socket] = []

        def expire() -> None:
            expired.set()
            for guard in guards:  # ends every read that still waits for a handshake, a header or a body
                _end(guard)

        timer = threading.Timer(self.fetch_timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            parts, asked = self.check_url(url), url
            for _ in range(MAX_REDIRECTS + 1):
                with self._answer(parts, guards, expired, deadline) as answer:
                    if answer.status in _REDIRECTS and (place := answer.getheader("Location")):
                        asked = urljoin(asked, place)
                        parts = self._redirected(url, asked)
                        continue
                    if answer.status != 200:
                        raise SourceUnavailable(
                            f"{shown} can't be fetched (HTTP status {answer.status} {answer.reason})"
                        )
                    return _body(answer, max_bytes, expired)
            raise SourceUnavailable(f"{shown} can't be fetched (more than {MAX_REDIRECTS} redirects)")
        except (OSError, HTTPException) as error:
            late = f"it takes longer than data.media.fetch_timeout_s = {self.fetch_timeout_s:g} s"
            why = late if expired.is_set() else f"{error}; check the network, or name a file"
            raise SourceUnavailable(f"{shown} can't be fetched ({why})") from error
        finally:
            timer.cancel()
            for guard in guards:
                guard.close()

    def _redirected(self, url: str, place: str) -> SplitResult:
        try:
            return self.check_url(place)
        except ConfigError as refused:  # worth a retry: the host may redirect elsewhere next time
            raise SourceUnavailable(f"{shown_url(url)} redirects to a URL that is not allowed: {refused}") from refused

    @contextmanager
    def _answer(
        self, parts: SplitResult, guards: list[socket.socket], expired: threading.Event, deadline: float
    ) -> Iterator[HTTPResponse]:
        """Request a URL from an address of its host that was checked before connecting; yield the response."""
        host = _plain(parts.hostname or "")
        port = parts.port or _PORTS[parts.scheme]
        connected = self._connected(host, port, deadline)
        guards.append(connected.dup())
        if expired.is_set():
            _end(connected)
        connection = HTTPConnection(host, port)
        try:
            connection.sock = connected
            if parts.scheme == "https":
                connection.sock = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
            query = "?" + quote(parts.query, safe=_WRITTEN + "?[]") if parts.query else ""
            target = quote(parts.path or "/", safe=_WRITTEN) + query
            place = f"[{host}]" if ":" in host else host
            named = place if port == _PORTS[parts.scheme] else f"{place}:{port}"
            connection.request("GET", target, headers={"Host": named, "User-Agent": "relax", "Connection": "close"})
            answer = connection.getresponse()
            with answer:
                yield answer
        finally:
            connection.close()
            connected.close()

    def _connected(self, host: str, port: int, deadline: float) -> socket.socket:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(where[4][0]) for where in found))
        permitted = [text for text in addresses if self._permits(text)]
        if not permitted:
            fix = f"add the address to {HOSTS} to allow it"
            raise SourceUnavailable(f"{host} is at {', '.join(addresses)}, which is not a public address; {fix}")
        for number, text in enumerate(permitted, 1):
            try:
                return socket.create_connection((text, port), max(deadline - time.monotonic(), 0.001))
            except OSError:
                if number == len(permitted):
                    raise
        raise OSError(f"{host} has no address")

    def _permits(self, text: str) -> bool:
        """Return True if connecting to an address is allowed: it is public, or allowed itself."""
        address = _address(text)
        if address is None:
            return False
        if any(address in network for network in self._networks):
            return True
        local = isinstance(address, IPv6Address) and address.is_site_local
        return address.is_global and not (local or address.is_multicast or address.is_reserved)


def _address(text: str) -> Address | None:
    """Parse an IP address; return None if it is not one. An IPv6 form of an IPv4 address gives the IPv4 address."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if (inner := address.ipv4_mapped or address.sixtofour) is not None:
            return inner
        if address in _TRANSLATED:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _plain(host: str) -> str:
    """Return a host in the form that is compared and requested: lower case, ASCII, without a dot at the end."""
    host = host.rstrip(".").lower()
    try:
        return host if host.isascii() else host.encode("idna").decode()
    except UnicodeError as error:
        raise ValueError(f"host {host!r}") from error


def _body(answer: HTTPResponse, max_bytes: int, expired: threading.Event) -> bytes:
    data = bytearray()
    while len(data) <= max_bytes and (part := answer.read(min(_READ_BYTES, max_bytes + 1 - len(data)))):
        data += part
    if expired.is_set() or (answer.length and len(data) <= max_bytes):
        raise HTTPException(f"the body ends after {len(data)} bytes")  # cut off: the medium itself may be fine
    return bytes(data)


def _end(connected: socket.socket) -> None:
    with suppress(OSError):  # already closed
        connected.shutdown(socket.SHUT_RDWR)


def shown_url(url: str) -> str:
    """Return a URL for messages and logs, without user and query, which may be secret."""
    head, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    bare = f"{head}{separator}{host.rpartition('@')[2]}{slash}{path}".partition("#")[0]
    where, query, _ = bare.partition("?")
    return where[:200] + ("?..." if query else "")


def path_of(source: str) -> str | None:
    """Return the path that a source names by itself or as a `file:` URL, else None.

    Raises ConfigError for a `file:` URL of a remote host.
    """
    if not source.startswith("file://"):
        return None if "://" in source else source
    host, slash, rest = source.removeprefix("file://").partition("/")
    if not slash or host not in ("", "localhost"):
        raise ConfigError("data.train", source[:200], "write file:///absolute/path, or a path")
    return "/" + unquote(rest)
