# SPDX-License-Identifier: Apache-2.0
"""How remote calls answer: a value, or a failure as data. Errors of ours do not survive Ray's own wrapping unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ray.exceptions import RayError

from relax_core.api.errors import DeadlineExceeded, WorkerDied
from relax_core.runners.host import Failure, describe, raised


async def answered(work: Awaitable[Any]) -> Any:
    """On the called side: the value, or what was raised, described."""
    try:
        return await work
    except Exception as error:
        return describe(error)


async def asked(call: Awaitable[Any], name: str, what: str, timeout_s: float) -> Any:
    """On the calling side: the value, or the error raised as its own type."""
    try:
        async with asyncio.timeout(timeout_s):
            value = await call
    except TimeoutError:
        raise DeadlineExceeded(name, f"{what} to return", timeout_s) from None
    except (RayError, ConnectionError) as error:
        raise WorkerDied(f"{name} died during {what}: {_first_line(error)}") from error
    if isinstance(value, Failure):
        raise raised(value, name)
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
