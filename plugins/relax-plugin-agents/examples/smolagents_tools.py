# SPDX-License-Identifier: Apache-2.0
"""A tool-calling agent of smolagents.

It writes its own history: what the model called and what came of it come back in words of its own. So each of its calls is a
row of its own, trained on what was sampled there.
"""

from calculator_task import MODEL, PROMPT, TURNS, add, report
from smolagents import AgentError, OpenAIModel, ToolCallingAgent, tool


@tool
def added(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return add({"a": a, "b": b})


added.name = "add"
# Its default forces a tool in every turn, which would change the distribution that is trained.
model = OpenAIModel(MODEL, tool_choice="auto")
agent = ToolCallingAgent([added], model, max_steps=TURNS, verbosity_level=0)
try:
    said = str(agent.run(PROMPT))
except AgentError:
    said = ""
report(said)
