# SPDX-License-Identifier: Apache-2.0
"""Says what `renderers` makes of tokens, in the clients' interpreter: a line of JSON in, a line of JSON out.

A request names a family, the file of its tokenizer, and tools. `parse` gives it a turn behind a prompt, and `bridge` the prompt
and turn that messages follow.
"""

import json
import sys
from functools import cache
from typing import Any

from renderers import (
    DeepSeekV3Renderer,
    GLM45Renderer,
    GLM45RendererConfig,
    KimiK2Renderer,
    Llama3Renderer,
    Qwen3Renderer,
    Qwen3RendererConfig,
    Qwen35Renderer,
    Qwen35RendererConfig,
)
from renderers.parsing import parse_gpt_oss
from tokenizers import Tokenizer

KEEP: dict[str, Any] = {"thinking_retention": "all"}
"""Tokens stay as they were sampled, whatever the family's template leaves out of earlier turns."""


class Tokens:
    """As much of a tokenizer as renderers asks for."""

    unk_token_id = eos_token_id = None

    def __init__(self, file: str) -> None:
        self.name_or_path, self._tokenizer = file, Tokenizer.from_file(file)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


class GptOss:
    """The parser of gpt-oss alone: its renderer would download a vocabulary."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def parse_response(self, ids: list[int], *, prompt_ids: list[int], tools: list[Any]) -> Any:
        names = ("return", "call", "start", "end", "channel", "message", "constrain")
        marks = {f"{name}_id": self._tokens.convert_tokens_to_ids(f"<|{name}|>") for name in names}
        return parse_gpt_oss(self._tokens, [*self._tokens.encode("<|start|>assistant"), *ids], **marks)


FAMILIES: dict[str, Any] = {
    "hermes": lambda tokens: Qwen3Renderer(tokens, Qwen3RendererConfig(**KEEP)),
    "qwen3-coder": lambda tokens: Qwen35Renderer(tokens, Qwen35RendererConfig(enable_thinking=True, **KEEP)),
    "glm": lambda tokens: GLM45Renderer(tokens, GLM45RendererConfig(**KEEP)),
    "llama": Llama3Renderer,
    "deepseek": DeepSeekV3Renderer,
    "kimi": KimiK2Renderer,
    "harmony": GptOss,
}


@cache
def renderer(family: str, file: str) -> Any:
    return FAMILIES[family](Tokens(file))


def answer(request: dict[str, Any]) -> Any:
    known, tools = renderer(request["family"], request["tokenizer"]), request.get("tools")
    if "bridge" in request:
        prompt, turn, messages = request["bridge"]
        bridged = known.bridge_to_next_turn(prompt, turn, messages, tools=tools)
        return None if bridged is None else bridged.token_ids
    prompt, turn = request["parse"]
    parsed = known.parse_response(turn, prompt_ids=prompt, tools=tools)
    calls = [[call.name, call.arguments, str(call.status)] for call in parsed.tool_calls]
    return {"content": parsed.content, "calls": calls}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
