# SPDX-License-Identifier: Apache-2.0
"""The log of a run as lines of JSON, for `relax logs --address`.

The first lines are the newest wanted records so far, within limits; with `followed`, later records come as the run writes
them. The last line is a document with remarks. An empty line shows a client that the connection lives. Records are sent
as the run's files have them, and these files have no secrets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar

from relax_core.runs import LOOK_S, REMARKS, LogFilter, RunLogs, RunView, chosen, encode, looks, remarks

MAX_RECORDS, MAX_BYTES = 10_000, 32_000_000
"""Most records, and most bytes of them, that are sent at once. Earlier records are left out."""
QUIET_S = 10.0
"""Seconds between two empty lines of a silent stream."""
T = TypeVar("T")


async def log_lines(view: RunView, wanted: LogFilter, last: int, followed: bool) -> AsyncIterator[bytes]:
    """Yield the lines of a log; `last` is the most records so far to send."""
    logs, sources, left_out, silent = RunLogs(view.path), set[str](), 0, 0.0
    found: Iterator[tuple[Iterable[dict[str, Any]], bool]] = iter([(logs.added(), True)])
    if followed:
        found = looks(view, logs)
    over = False

    def look() -> tuple[deque[bytes], int, bool]:
        records, ends = next(found)
        return *newest(chosen(records, wanted, sources), last), ends

    while not over:
        looking = asyncio.ensure_future(asyncio.to_thread(look))
        while not (await asyncio.wait({looking}, timeout=QUIET_S))[0]:
            yield b"\n"
        lines, more, over = looking.result()
        last, left_out = MAX_RECORDS, left_out + more
        for line in lines:
            yield line
        silent = 0.0 if lines else silent + LOOK_S
        if silent >= QUIET_S:
            silent = 0.0
            yield b"\n"
        if not over:
            await asyncio.sleep(LOOK_S)
    said = await asyncio.to_thread(lambda: list(remarks(view, logs, wanted, sources, followed)))
    if left_out:
        said.append(f"{left_out} earlier records are left out; choose others with --role, --level, --since or --step")
    yield _line({"schema": REMARKS, "remarks": said})


def newest(records: Iterable[dict[str, Any]], last: int) -> tuple[deque[bytes], int]:
    """Return the last records as lines of at most MAX_BYTES, and the number of records that this limit removed."""
    lines, size, removed = deque[bytes](), 0, 0
    for record in records:
        lines.append(_line(record))
        size += len(lines[-1])
        while len(lines) > last or size > MAX_BYTES:
            removed += len(lines) <= last or last == MAX_RECORDS
            size -= len(lines.popleft())
    return lines, removed


def _line(document: dict[str, Any]) -> bytes:
    """Return a document as a line; a surrogate, which UTF-8 can't encode, becomes an escape of JSON."""
    return (encode(document) + "\n").encode("utf-8", errors="backslashreplace")
