# SPDX-License-Identifier: Apache-2.0
"""The task of the example agents in this folder: a sum, with a tool that adds.

Each example shows one client library. This file has the shared parts: reading the task and reporting a reward.
"""

import json
import os
import urllib.request

with open(os.environ["RELAX_TASK"], encoding="utf-8") as file:
    task = json.load(file)
PROMPT, ANSWER = task["prompt"], task["answer"]
MODEL = os.environ["RELAX_MODEL"]
TURNS = 4
"""Most turns of the model, since an untrained policy may call tools without end."""
STOP = "\n\nQ:"
"""Text that ends an answer of the model; the client gets the text before it."""
DESCRIPTION = "Add two integers."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def add(arguments: dict) -> str:
    """Run the tool with the model's arguments; return wrong arguments as an error text that the model reads."""
    try:
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def report(said: str | None) -> None:
    """Judge the agent's last answer, which ends before STOP, and post the reward."""
    reward = float(ANSWER in (said or "") and STOP not in (said or ""))
    request = urllib.request.Request(
        os.environ["RELAX_REPORT_URL"],
        json.dumps({"reward": reward}).encode(),
        {"authorization": f"Bearer {os.environ['RELAX_REPORT_KEY']}", "content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).close()
