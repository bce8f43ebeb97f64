# SPDX-License-Identifier: Apache-2.0
"""The child side of a local worker: serves a `Host` on a socket from its parent, and ends with its parent.

The process is started as `python -m relax_core.runners.local.child FD` or forked by `fork_server`. It reads its
specification (the certificate) from standard input and serves calls on the socket with file descriptor FD. Output of
hosted code goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from relax_core.observe.process_log import send_to_parent
from relax_core.rpc import messages
from relax_core.rpc.connection import Connection
from relax_core.rpc.host import Host, describe
from relax_core.rpc.isolated_host import IsolatedHost
from relax_core.runners.local.keeper import fork_kept
from relax_core.runners.local.landlock import give_up_writing, is_below
from relax_core.runners.local.mode_filter import refuse_mode_changes
from relax_core.runners.local.mounts import MEMORY
from relax_core.runners.local.parent_death import end_with_parent

NO_NAMESPACES = (
    "this machine gives this process no process namespace ({}): its code can change the limits, priority and processors of "
    "the run's other processes"
)
TEMPORARY = ("/tmp", "/var/tmp")


def serve(channel: int) -> None:
    """Read the certificate, build the host, and serve calls until the parent ends or closes standard input."""
    certificate = messages.decode(_read_exactly(struct.unpack("<I", _read_exactly(4))[0]))
    Path("/proc/self/comm").write_text(certificate["name"])  # for ps and top, which cut it to 15 characters
    os.dup2(2, 1)
    if certificate["records"]:
        send_to_parent()
    if certificate["scratch"]:
        _confine(channel, certificate)
    end_with_parent()
    if memory_mb := certificate["memory_mb"]:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    try:
        host = _host(certificate)
        connection = Connection("parent", host.call, host.stream)
        if isinstance(host.instance, IsolatedHost):
            host.instance.parent.connection = connection
    except BaseException as error:
        connection = Connection("parent", failure=describe(error))
    asyncio.run(_serve(connection, socket.socket(fileno=channel)))


def _confine(channel: int, certificate: dict[str, Any]) -> None:
    """Give up the run directory, and writing outside of a few folders. Call it while there is one thread."""
    scratch, protected = certificate["scratch"], certificate.pop("protected")  # hosted code must not find its name here
    hidden = [os.path.realpath(protected)] if protected else []
    for folder in certificate["writable"]:
        os.makedirs(folder, exist_ok=True)
    temporary = (scratch, os.environ.get("TMPDIR", scratch), *filter(os.path.isdir, TEMPORARY))
    writable = [os.path.realpath(folder) for folder in (*certificate.pop("writable"), *temporary)]
    code = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if os.path.isdir(path)}
    closed = [path for path in code.difference(writable) if any(is_below(path, folder) for folder in writable)]
    if "/" in writable:
        closed = []
    if os.path.isdir(recipe := certificate.pop("recipe")):
        closed.append(os.path.realpath(recipe))
    refusal = fork_kept(channel, scratch, writable, closed, hidden)
    os.chdir(scratch)
    if not (give_up_writing([*writable, MEMORY], *([*closed, *hidden], hidden) if refusal else ())):
        lacks = "change your files and the run directory" if refusal else "use all devices that you may use"
        print(f"relax: this kernel has no Landlock: the code of this process can {lacks}", flush=True)
    if refusal:
        filtered = "/" not in writable and refuse_mode_changes()
        modes = (
            "changes of modes, owners and attributes of files fail" if filtered else "it can change modes of your files"
        )
        print(f"relax: {NO_NAMESPACES.format(refusal)}; {modes}", flush=True)


def _host(certificate: dict[str, Any]) -> Host:
    from relax_core.registry.catalogue import Catalogue

    catalogue = Catalogue.load(certificate["plugin_files"])
    if certificate["resolved"]:
        catalogue.verify(certificate["resolved"], shared=certificate["own_interpreter"])
    return Host.make(certificate["component"], certificate["target"], catalogue)


async def _serve(connection: Connection, channel: socket.socket) -> None:
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=channel)
    await asyncio.Event().wait()  # the process is killed when standard input closes


def _read_exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) != size:
        os._exit(1)
    return data


if __name__ == "__main__":
    serve(int(sys.argv[1]))
