# SPDX-License-Identifier: Apache-2.0
"""A program under limits, where a box can't show it."""

from __future__ import annotations

import asyncio

from relax_plugin_sandboxes.program import _Output


async def test_output_beyond_the_limit_is_read_and_dropped() -> None:
    """Unread, it would keep the end of its process from being noticed."""
    stream, output = asyncio.StreamReader(), _Output(10)
    for _ in range(3):
        stream.feed_data(b"seven b")
    stream.feed_eof()
    await output.read(stream, 1)
    assert stream.at_eof() and output.over.is_set()
    assert [bytes(part) for part in output.parts] == [b"", b"seven bsev"]


async def test_as_much_as_may_be_kept_is_not_too_much() -> None:
    stream, output = asyncio.StreamReader(), _Output(10)
    stream.feed_data(b"ten bytes.")
    stream.feed_eof()
    await output.read(stream, 0)
    assert not output.over.is_set() and output.parts[0] == b"ten bytes."
