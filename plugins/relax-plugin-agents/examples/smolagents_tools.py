# SPDX-License-Identifier: Apache-2.0
"""A tool-calling agent with smolagents.

smolagents rewrites its history: it sends earlier calls and their results back as its own text. So each call of the
policy becomes a separate row, which is trained on the tokens sampled in that call.
"""

from calculator_task import MODEL, PROMPT, TURNS, add, report
from smolagents import AgentError, OpenAIModel, ToolCallingAgent, tool


@tool
def added(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return add({"a": a, "b": b})


added.name = "add"
# The default forces a tool call in every turn, which would change the trained distribution.
model = OpenAIModel(MODEL, tool_choice="auto")
agent = ToolCallingAgent([added], model, max_steps=TURNS, verbosity_level=0)
try:
    said = str(agent.run(PROMPT))
except AgentError:
    said = ""
report(said)
