# SPDX-License-Identifier: Apache-2.0
"""The first program of a box, outside of one: it ends as its command ends, and holds little of what it forwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from relax_plugin_agents import forward

TEXT = Path(forward.__file__).read_text()
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PRINT_PORT = (
    "import os, time; print(os.environ['URL'].rpartition(':')[2], os.environ['RELAX_TASK'], flush=True); time.sleep(60)"
)


@contextlib.asynccontextmanager
async def forwarding(answer: Answer) -> AsyncIterator[tuple[int, psutil.Process]]:
    """Give the port at which a command reaches a server, and the process that forwards."""
    with TemporaryDirectory(prefix="relax-") as folder:
        server = await asyncio.start_unix_server(answer, f"{folder}/socket")
        process = await started(PRINT_PORT, f"{folder}/socket")
        assert process.stdout is not None
        port, task = (await process.stdout.readline()).split()
        assert os.path.isabs(task)
        try:
            yield int(port), psutil.Process(process.pid)
        finally:
            process.terminate()
            await process.wait()
            server.close()


async def started(command: str, socket: str = "/no/socket") -> asyncio.subprocess.Process:
    env = {"RELAX_SOCKET": socket, "RELAX_TASK": "task.json", "URL": forward.GATEWAY}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", TEXT, sys.executable, "-c", command,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env=env,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "code"),
    [("", 0), ("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)],
)
async def test_the_forwarder_exits_with_its_commands_status(command: str, code: int) -> None:
    async with asyncio.timeout(60):
        assert await (await started(command)).wait() == code


async def test_signals_are_passed_on() -> None:
    process = await started(
        "import os, signal, time\nsignal.signal(15, lambda *_: os._exit(3))\nprint(1, flush=True)\ntime.sleep(60)"
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        await process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 3


async def test_bytes_pass_in_both_directions_side_by_side() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()

    async def one(port: int, number: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = bytes([number]) * (1 << 20)
        writer.write(sent)
        read = await reader.readexactly(len(sent))
        writer.close()
        return read == sent

    async with asyncio.timeout(60), forwarding(echo) as (port, _):
        assert all(await asyncio.gather(*(one(port, number) for number in range(20))))


async def test_a_client_that_goes_away_is_noticed() -> None:
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()

    async with asyncio.timeout(60), forwarding(wait) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"question")
        await writer.drain()
        writer.close()
        await gone.wait()


async def test_unread_output_is_not_buffered() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with asyncio.timeout(60), forwarding(deaf) as (port, process):
        before, writers = process.memory_info().rss, []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(bytes(8 << 20))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(writer.drain() for writer in writers)), 3.0)
        assert process.memory_info().rss - before < 32 << 20
        for writer in writers:
            writer.transport.abort()


async def test_a_missing_socket_closes_the_connection() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with asyncio.timeout(60), forwarding(nothing) as (port, process):
        os.unlink(process.environ()["RELAX_SOCKET"])
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
