# SPDX-License-Identifier: Apache-2.0
"""Starting several things as one: all of them, or none that still runs when the error is raised.

`asyncio.gather` alone lets the others go on starting after one has failed, where nobody would end them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def start_all(*starts: Coroutine[Any, Any, T]) -> list[T]:
    """Their results in order. When one fails, or this is cancelled, the others are cancelled and awaited first."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
