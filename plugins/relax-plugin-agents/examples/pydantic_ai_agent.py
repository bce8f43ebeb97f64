# SPDX-License-Identifier: Apache-2.0
"""An agent with Pydantic AI: `python pydantic_ai_agent.py chat`, `responses` or `messages` (Anthropic's, streamed)."""

import sys
from collections.abc import AsyncIterable

from calculator_task import MODEL, PROMPT, TURNS, add, report
from pydantic_ai import Agent, AgentRunError, AgentStreamEvent, RunContext, UsageLimits

if sys.argv[1] == "messages":
    from pydantic_ai.models.anthropic import AnthropicModel as Model
elif sys.argv[1] == "responses":
    from pydantic_ai.models.openai import OpenAIResponsesModel as Model
else:
    from pydantic_ai.models.openai import OpenAIChatModel as Model
agent = Agent(Model(MODEL))


@agent.tool_plain(name="add")
def added(a: int, b: int) -> str:
    """Add two integers."""
    return add({"a": a, "b": b})


async def watch(context: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
    """Read the stream of each answer, and of the calls of tools."""
    async for _ in events:
        pass


handler = watch if sys.argv[1] == "messages" else None
try:
    said = agent.run_sync(PROMPT, usage_limits=UsageLimits(request_limit=TURNS), event_stream_handler=handler).output
except AgentRunError:  # the model called tools until the limit of turns, or called them wrongly
    said = ""
report(said)
