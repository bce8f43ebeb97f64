# SPDX-License-Identifier: Apache-2.0
"""Readers of a board wait for what they read, not for something else that is written."""

from __future__ import annotations

import asyncio

from relax_core.api.clock import SystemClock
from relax_core.api.events import Logged
from relax_core.runners.board import BoardService


async def test_a_command_does_not_keep_readers_of_events_from_waiting() -> None:
    board = BoardService(SystemClock())
    await board.emit(Logged("info", "actor", "hello", {}))
    await board.command("actor", "stop", "SIGTERM")
    listener = asyncio.create_task(board.commands("actor", 0, 10.0))
    assert not listener.done()
    assert await board.events(1, 0.01) == ()
    assert [command.name for command in listener.result()] == ["stop"]
