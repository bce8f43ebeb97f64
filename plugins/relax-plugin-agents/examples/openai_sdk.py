# SPDX-License-Identifier: Apache-2.0
"""An agent loop with only OpenAI's SDK: `python openai_sdk.py chat`, `chat-stream` or `responses`."""

import json
import sys

import openai
from calculator_task import DESCRIPTION, MODEL, PARAMETERS, PROMPT, STOP, TURNS, add, report

client = openai.OpenAI()
FUNCTION = {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}


def chat(stream: bool) -> str | None:
    messages: list = [{"role": "user", "content": PROMPT}]
    asked = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}], "stop": STOP}
    said = None
    for _ in range(TURNS):
        if stream:
            with client.chat.completions.stream(**asked, messages=messages) as events:
                try:
                    completion = events.get_final_completion()
                except openai.LengthFinishReasonError as cut:  # the helper raises if a limit cut the answer
                    completion = cut.completion
                message = completion.choices[0].message
        else:
            message = client.chat.completions.create(**asked, messages=messages).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        said = message.content
        if not message.tool_calls:
            break
        for call in reversed(message.tool_calls):  # a result names its call, so results may have any order
            result = add(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return said


def responses() -> str | None:
    items: list = [{"role": "user", "content": PROMPT}]
    said = None
    for _ in range(TURNS):
        response = client.responses.create(model=MODEL, input=items, tools=[{"type": "function", **FUNCTION}])
        items += [item.model_dump(exclude_none=True) for item in response.output]
        said = response.output_text
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        for call in reversed(calls):
            output = add(json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return said


how = sys.argv[1]
report(responses() if how == "responses" else chat(stream=how == "chat-stream"))
