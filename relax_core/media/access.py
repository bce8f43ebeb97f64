# SPDX-License-Identifier: Apache-2.0
"""Limits of what a source of media may name: hosts, addresses and folders; and reading within them.

Task files are often written by strangers, so that a URL or a path in one reaches only what the configuration names. A URL is
fetched from an address that was checked, also behind a redirect: a name that resolves to something else a moment later
changes nothing. A file is checked again when it is open, where no link can be put in its place any more. Proxies of the
environment are not used: they would connect to what was not checked here.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
"""Characters of a URL that are sent as they stand."""

Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class SourceAccess:
    """The hosts and folders that sources of media may name.

    Invariants:
    - Bytes come from an allowed host at a public address, or one that is allowed itself; after a redirect too.
    - Bytes come from files whose real path, links followed, lies below an allowed folder.
    """

    allowed_hosts: Sequence[str] = ()
    """Names of hosts, `*.name` for those below a name; addresses and networks that need not be public."""
    allowed_folders: Sequence[str] | None = None
    """Folders, or single files; None: any, for callers who name the files themselves."""
    fetch_timeout_s: float = FETCH_TIMEOUT_S
    """Longest time for one URL, redirects included."""

    @cached_property
    def _networks(self) -> list[IPv4Network | IPv6Network]:
        return [network for host in self.allowed_hosts if (network := _network(host)) is not None]

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
        fix = "name a folder above it there if its files may be read; the folder of the data file is always allowed"
        raise ConfigError(FOLDERS, f"{path}{leads}, outside of the allowed folders", fix)

    def read_file(self, path: str | Path, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes. Raises ConfigError, ValueError, SourceUnavailable."""
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
        """Return the parts of a URL. Raises ConfigError unless it is http(s) and its host is allowed by name."""
        try:
            parts = urlsplit(url)
            _ = parts.port
            host = _plain(parts.hostname or "")
        except ValueError as error:
            raise ConfigError("data.train", f"{shown_url(url)}, which is no URL ({error})", "correct it") from error
        if parts.scheme not in _PORTS or not host:
            raise ConfigError("data.train", shown_url(url), "give a path, an http(s) URL or a data-URI")
        names = (_plain(allowed) for allowed in self.allowed_hosts)
        if any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in names):
            return parts
        address = _address(host)
        if address is None or not any(address in network for network in self._networks):
            fix = f'write [data.media] allowed_hosts = ["{host}"] if it may be asked, or name a file'
            raise ConfigError(HOSTS, f"{shown_url(url)}, whose host is not allowed", fix)
        return parts

    def fetch(self, url: str, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes. Raises ConfigError for a URL that is not allowed, SourceUnavailable."""
        shown = shown_url(url)
        expired, deadline = threading.Event(), time.monotonic() + self.fetch_timeout_s
        guards: list[socket.socket] = []

        def expire() -> None:
            expired.set()
            for guard in guards:  # whoever reads a header, a handshake or a body that trickles sees its end
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
            why = late if expired.is_set() else f"{error}; is there a network? Else name a file"
            raise SourceUnavailable(f"{shown} can't be fetched ({why})") from error
        finally:
            timer.cancel()
            for guard in guards:
                guard.close()

    def _redirected(self, url: str, place: str) -> SplitResult:
        try:
            return self.check_url(place)
        except ConfigError as refused:  # the next answer may lead elsewhere
            raise SourceUnavailable(f"{shown_url(url)} leads elsewhere: {refused}") from refused

    @contextmanager
    def _answer(
        self, parts: SplitResult, guards: list[socket.socket], expired: threading.Event, deadline: float
    ) -> Iterator[HTTPResponse]:
        """Ask one of a host's addresses, each checked before it is connected to."""
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
            fix = f"add the address to {HOSTS} if it is meant"
            raise SourceUnavailable(f"{host} is at {', '.join(addresses)}, which is not a public address; {fix}")
        for number, text in enumerate(permitted, 1):
            try:
                return socket.create_connection((text, port), max(deadline - time.monotonic(), 0.001))
            except OSError:
                if number == len(permitted):
                    raise
        raise OSError(f"{host} has no address")

    def _permits(self, text: str) -> bool:
        """Tell whether an address may be connected to: a public one, or one that is allowed itself."""
        address = _address(text)
        if address is None:
            return False
        if any(address in network for network in self._networks):
            return True
        local = isinstance(address, IPv6Address) and address.is_site_local
        return address.is_global and not (local or address.is_multicast or address.is_reserved)


def _network(text: str) -> IPv4Network | IPv6Network | None:
    """Return the network that an address or network is; None for anything else."""
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def _address(text: str) -> Address | None:
    """Read an address; one of IPv4 that is written as, or reached through, one of IPv6 counts as that of IPv4."""
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
    """Write a host as it is compared and asked for: lower case, without a dot at its end, in ASCII."""
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
        raise HTTPException(f"it ends after {len(data)} bytes")  # cut off: says nothing about the medium
    return bytes(data)


def _end(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended


def shown_url(url: str) -> str:
    """Describe a URL for people and logs: without what may be a secret, its user and its query."""
    head, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    bare = f"{head}{separator}{host.rpartition('@')[2]}{slash}{path}".partition("#")[0]
    where, query, _ = bare.partition("?")
    return where[:200] + ("?..." if query else "")


def path_of(source: str) -> str | None:
    """Return the path of a source that is one, or a `file:` URL; None for any other. ConfigError for a URL of another host."""
    if not source.startswith("file://"):
        return None if "://" in source else source
    host, slash, rest = source.removeprefix("file://").partition("/")
    if not slash or host not in ("", "localhost"):
        raise ConfigError("data.train", source[:200], "write file:///absolute/path, or a path")
    return "/" + unquote(rest)
