# SPDX-License-Identifier: Apache-2.0
"""The task that the agents beside this file solve: a sum, with a tool that adds.

Each of them shows one client library; this file has what does not depend on it: reading the task, and reporting a reward.
"""

import json
import os
import urllib.request

with open(os.environ["RELAX_TASK"], encoding="utf-8") as file:
    task = json.load(file)
PROMPT, ANSWER = task["prompt"], task["answer"]
MODEL = os.environ["RELAX_MODEL"]
TURNS = 4
"""Most turns of the model: a policy that has learned nothing may call tools for ever."""
DESCRIPTION = "Add two integers."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def add(arguments: dict) -> str:
    """Run the tool as the model called it; what is wrong is for the model to read."""
    try:
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def report(said: str | None) -> None:
    """Judge the agent's last words, and post the reward."""
    reward = float(ANSWER in (said or ""))
    request = urllib.request.Request(
        os.environ["RELAX_REPORT_URL"],
        json.dumps({"reward": reward}).encode(),
        {"authorization": f"Bearer {os.environ['RELAX_REPORT_KEY']}", "content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).close()
