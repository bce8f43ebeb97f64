# SPDX-License-Identifier: Apache-2.0
"""A LangChain agent on LangGraph: `python langgraph_react.py chat`, `responses` or `messages` (Anthropic's)."""

import sys

from calculator_task import MODEL, PROMPT, TURNS, add, report
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError


@tool("add")
def added(a: int, b: int) -> str:
    """Add two integers."""
    return add({"a": a, "b": b})


if sys.argv[1] == "messages":
    model = ChatAnthropic(model=MODEL, max_tokens=512)
else:
    model = ChatOpenAI(model=MODEL, use_responses_api=sys.argv[1] == "responses")
try:
    state = create_agent(model, [added]).invoke(
        {"messages": [{"role": "user", "content": PROMPT}]}, {"recursion_limit": 2 * TURNS}
    )
    said = state["messages"][-1].text
except GraphRecursionError:  # the model called tools until the limit of turns
    said = ""
report(str(said))
