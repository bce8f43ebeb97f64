# SPDX-License-Identifier: Apache-2.0
"""The child side of a local worker: serves a `Host` on the socket that its parent made, and ends with its parent.

Started as `python -m relax_core.runners.local.child FD` with its birth certificate on standard input. Anything the
hosted code prints goes to standard error; calls come through the socket that is file descriptor FD.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import sys
from typing import Any

from relax_core.rpc import messages
from relax_core.rpc.connection import Connection
from relax_core.rpc.host import Host, describe
from relax_core.runners.local.parent_death import end_with_parent


def main() -> None:
    """Read the certificate, build the host, serve until told or orphaned."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    certificate = messages.decode(_read_exactly(struct.unpack("<I", _read_exactly(4))[0]))
    os.dup2(2, 1)
    end_with_parent()
    if memory_mb := certificate["memory_mb"]:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    try:
        host = _host(certificate)
        connection = Connection("parent", host.call, host.stream)
    except BaseException as error:
        connection = Connection("parent", failure=describe(error))
    asyncio.run(_serve(connection, channel))


def _host(certificate: dict[str, Any]) -> Host:
    from relax_core.registry.catalogue import Catalogue

    catalogue = Catalogue.load(certificate["plugin_files"])
    if certificate["resolved"]:
        catalogue.verify(certificate["resolved"], shared=certificate["own_interpreter"])
    return Host.make(certificate["component"], certificate["target"], catalogue)


async def _serve(connection: Connection, channel: socket.socket) -> None:
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=channel)
    await asyncio.Event().wait()  # standard input tells of the end, and then all that was started ends too


def _read_exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) != size:
        os._exit(1)
    return data


if __name__ == "__main__":
    main()
