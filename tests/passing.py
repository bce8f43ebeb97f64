# SPDX-License-Identifier: Apache-2.0
"""Time that passes at once in the process of an author's code, so that a test needs no short deadline."""

from __future__ import annotations

import asyncio


def an_hour_passes() -> None:
    """Let an hour pass for the event loops of this process; call it only in a child process, which ends with its test."""
    before = asyncio.BaseEventLoop.time
    asyncio.BaseEventLoop.time = lambda loop: before(loop) + 3600.0  # type: ignore[method-assign]
