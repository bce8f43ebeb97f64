# SPDX-License-Identifier: Apache-2.0
"""An agent with OpenAI's Agents SDK: `python openai_agents.py responses` or `chat`, `responses` as a stream."""

import asyncio
import sys

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from calculator_task import MODEL, PROMPT, TURNS, add, report

set_tracing_disabled(True)  # traces would be sent to OpenAI
set_default_openai_api("responses" if sys.argv[1] == "responses" else "chat_completions")


@function_tool(name_override="add", strict_mode=False)
def added(a: int, b: int) -> str:
    """Add two integers."""
    return add({"a": a, "b": b})


async def answer() -> str:
    agent = Agent("calculator", tools=[added], model=MODEL)
    if sys.argv[1] == "chat":
        return str((await Runner.run(agent, PROMPT, max_turns=TURNS)).final_output)
    streamed = Runner.run_streamed(agent, PROMPT, max_turns=TURNS)
    async for _ in streamed.stream_events():
        pass
    return str(streamed.final_output)


try:
    said = asyncio.run(answer())
except (MaxTurnsExceeded, ModelBehaviorError):  # the model called tools until the limit of turns, or an unknown tool
    said = ""
report(said)
