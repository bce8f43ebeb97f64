# SPDX-License-Identifier: Apache-2.0
"""An agent like mini-swe-agent: each turn of the model is a shell command, and its output is the next message.

The agent runs in a box with the standard library alone, and calls the policy as any model with an OpenAI-compatible
API.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from urllib.parse import urlsplit

TURNS = 6
SUBMIT = "submit"
SHOWN_WORDS = 40
"""Number of words of a command's output that the model sees, counted from the end."""
NOTHING = "(nothing)"


def main() -> None:
    with open(os.environ["RELAX_TASK"], encoding="utf-8") as file:
        prompt = json.load(file)["prompt"]
    said = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    for _ in range(TURNS):
        command = ask(said)
        if command.strip() == SUBMIT:
            break
        said += [command, run(command)]


def ask(said: list[str]) -> str:
    """Return the model's next turn; `said` alternates between user and assistant."""
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=600)
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    body = json.dumps({"model": os.environ["RELAX_MODEL"], "messages": messages})
    connection.request("POST", f"{address.path}/chat/completions", body, headers)
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    if answer.status != 200:
        sys.exit(f"the model answered with {answer.status}: {read[:500]!r}")
    return str(json.loads(read)["choices"][0]["message"]["content"] or "")


def run(command: str) -> str:
    """Run a command of the model and return the end of its output; `python` is the interpreter that runs this agent.

    `-B` prevents compiled files: Python would use the compiled file of an edited module with equal size and mtime.
    """
    shell = ["/bin/sh", "-c", f'python() {{ "{sys.executable}" -B "$@"; }}\n{command}']
    try:
        done = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "timeout"
    return " ".join((done.stdout + done.stderr).split()[-SHOWN_WORDS:]) or NOTHING


if __name__ == "__main__":
    main()
