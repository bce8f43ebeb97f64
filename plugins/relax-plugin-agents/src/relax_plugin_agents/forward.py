# SPDX-License-Identifier: Apache-2.0
"""The first program in an agent's box: forwards an address on the box's loopback to the policy's socket.

The box runs this source as `python -c SOURCE COMMAND ...`, so it uses only the standard library. The program starts
COMMAND, and forwards bytes to the socket `$RELAX_SOCKET` without parsing them. It exits with COMMAND's status; the box
then ends all remaining processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

CHUNK = 1 << 16
"""Approximate number of bytes that a connection buffers in each direction."""
GATEWAY = "http://gateway.invalid"
"""Placeholder for the loopback address in the command's environment variables; `main` replaces it."""


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection until its end, as fast as the receiving side reads."""
    try:
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass  # one side has disconnected; `forward` closes both


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        socket_reader, socket_writer = await asyncio.open_unix_connection(os.environ["RELAX_SOCKET"], limit=CHUNK)
    except OSError:
        writer.close()
        return
    ways = [asyncio.ensure_future(copy(reader, socket_writer)), asyncio.ensure_future(copy(socket_reader, writer))]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)  # the end of either direction ends the connection
    for way in ways:
        way.cancel()
    for side in (writer, socket_writer):
        side.close()


async def main(command: list[str], env: dict[str, str]) -> int:
    server = await asyncio.start_server(forward, "127.0.0.1", 0, limit=CHUNK)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    env = {name: value.replace(GATEWAY, address) for name, value in env.items()}
    try:
        program = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, env=env)
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror}", file=sys.stderr)
        return 127
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, program.send_signal, number)
    return await program.wait()


if __name__ == "__main__":
    described = os.path.abspath(os.environ["RELAX_TASK"])
    code = asyncio.run(main(sys.argv[1:], {**os.environ, "RELAX_TASK": described}))
    sys.exit(code if code >= 0 else 128 - code)  # like a shell, 128 + the number of the signal
