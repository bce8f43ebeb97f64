# SPDX-License-Identifier: Apache-2.0
"""An agent loop with only Anthropic's SDK: `python anthropic_sdk.py whole` or `stream`."""

import sys

import anthropic
from calculator_task import DESCRIPTION, MODEL, PARAMETERS, PROMPT, STOP, TURNS, add, report

client = anthropic.Anthropic()
TOOLS = [{"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}]
messages: list = [{"role": "user", "content": PROMPT}]
said = ""
for _ in range(TURNS):
    asked = {"model": MODEL, "max_tokens": 512, "messages": messages, "tools": TOOLS, "stop_sequences": [STOP]}
    if sys.argv[1] == "stream":
        with client.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**asked)
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    said = "".join(block.text for block in answer.content if block.type == "text")
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    # A result names its call, so results may have any order.
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in reversed(calls)]
    messages.append({"role": "user", "content": results})
report(said)
