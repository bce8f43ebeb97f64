# SPDX-License-Identifier: Apache-2.0
"""Requests to the application of a control API, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from relax_plugin_control.app import RunApi, make_app

from relax_core.views.run import RunView

TOKEN = "0123456789abcdef"


def call(path: Path, method: str, route: str, key: str = "", token: str = TOKEN, **how: Any) -> httpx.Response:
    """Send one request to the application of a run."""
    headers = {"authorization": f"Bearer {token}"} | ({"idempotency-key": key} if key else {})

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(RunApi(RunView(path), TOKEN)))
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            return await client.request(method, route, headers=headers, **how)

    return asyncio.run(send())
