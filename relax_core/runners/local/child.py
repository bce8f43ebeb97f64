# SPDX-License-Identifier: Apache-2.0
"""The child side of a local worker: serves a `Host` over loopback HTTP, and ends when its parent's pipe closes.

Started as `python -m relax_core.runners.local.child FD` with its birth certificate on standard input. Anything the
hosted code prints goes to standard error; the port travels back through file descriptor FD.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import resource
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from relax_core.rpc import messages
from relax_core.rpc.host import Failure, Host, describe
from relax_core.runners.local.parent_death import end_with_parent

messages.register(Failure)
MAX_BODY = 1 << 34
"""Bodies come from our own parent; the bound only turns a corrupt length into an error."""


def main() -> None:
    """Read the certificate, build the host, serve until told or orphaned."""
    report = int(sys.argv[1])
    certificate = messages.decode(_read_exactly(struct.unpack("<I", _read_exactly(4))[0]))
    os.dup2(2, 1)
    end_with_parent()
    if memory_mb := certificate["memory_mb"]:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    try:
        host = _host(certificate)
    except BaseException as error:
        _report(report, {"failure": describe(error)})
        os._exit(1)
    asyncio.run(_serve(host, certificate["token"], report))


def _host(certificate: dict[str, Any]) -> Host:
    from relax_core.registry.catalogue import Catalogue

    catalogue = Catalogue.load(certificate["plugin_files"])
    if certificate["resolved"]:
        catalogue.verify(certificate["resolved"], shared=certificate["own_interpreter"])
    return Host.make(certificate["component"], certificate["target"], catalogue)


async def _serve(host: Host, token: str, report: int) -> None:
    application = web.Application(client_max_size=MAX_BODY)
    application.router.add_post("/call/{method}", _guarded(token, lambda request: _call(host, request)))
    application.router.add_post("/stream/{method}", _guarded(token, lambda request: _stream(host, request)))
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _report(report, {"port": runner.addresses[0][1], "protocol": messages.PROTOCOL})
    await asyncio.Event().wait()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _guarded(token: str, handler: Handler) -> Handler:
    async def guarded(request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", ""), f"Bearer {token}"):
            return web.Response(status=401, text="bearer token missing or wrong")
        return await handler(request)

    return guarded


async def _call(host: Host, request: web.Request) -> web.Response:
    try:
        result = await host.call(request.match_info["method"], messages.decode(await request.read()))
        return web.Response(body=messages.encode(result))
    except Exception as error:
        return web.Response(status=500, body=messages.encode(describe(error)))


async def _stream(host: Host, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    items: AsyncIterator[Any] = host.stream(request.match_info["method"], messages.decode(await request.read()))
    try:
        async for item in items:
            await response.write(frame(messages.encode(item)))
    except ConnectionError:
        await items.aclose()  # type: ignore[attr-defined]
        return response
    except Exception as error:
        await response.write(frame(messages.encode(describe(error)), failed=True))
    await response.write(END)
    await response.write_eof()
    return response


END = struct.pack("<BI", 2, 0)


def frame(body: bytes, failed: bool = False) -> bytes:
    """One stream item: kind (0 item, 1 failure, 2 end), length, body."""
    return struct.pack("<BI", int(failed), len(body)) + body


def _read_exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) != size:
        os._exit(1)
    return data


def _report(descriptor: int, message: dict[str, Any]) -> None:
    body = messages.encode(message)
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, struct.pack("<I", len(body)) + body)
    os.close(descriptor)


if __name__ == "__main__":
    main()
