# SPDX-License-Identifier: Apache-2.0
"""A harness for the real verifiers that asks the task's question once. Its program is Python's own library, while verifiers'
harnesses install packages at their first episode."""

from __future__ import annotations

import sys

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult, Runtime

__all__ = ["Asks"]

PROGRAM = """
import json, sys, urllib.request
url, key, model, prompt = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers), timeout=600)
"""


class Asks(vf.Harness[HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        _, prompt = self.resolve_text_prompt(data)
        return await runtime.run([sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, prompt], {})
