# SPDX-License-Identifier: Apache-2.0
"""The task: sums and products of two numbers; also the tokenizer and the chat template for calculator calls."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from relax_contrib.recipes import making
from relax_contrib.recipes.calculator.server import calculate
from relax_contrib.recipes.quickstart.model import CHARACTERS, SPECIAL

OPENS, CLOSES = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
"""The parts of a call before and after the expression; each is one token."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}[{{ message['content'] }}]{% else %}"
    "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}"
    f"{{{{ {OPENS!r} }}}}{{{{ call['function']['arguments']['expression'] }}}}{{{{ {CLOSES!r} }}}}"
    "{% endfor %}{% endif %}{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
NUM_TRAIN, NUM_HELD_OUT = 2048, 256
HIGHEST = 99


class Item(NamedTuple):
    """A question and the calculator's result."""

    expression: str
    answer: str


def items(seed: int) -> tuple[list[Item], list[Item]]:
    """Return disjoint items for training and for held-out evaluation."""
    random = Random(f"calculator {seed}")
    drawn: dict[str, None] = {}
    while len(drawn) < NUM_TRAIN + NUM_HELD_OUT:
        drawn[f"{random.randint(0, HIGHEST)}{random.choice('+*')}{random.randint(0, HIGHEST)}"] = None
    made = [Item(expression, calculate(expression)) for expression in drawn]
    return made[:NUM_TRAIN], made[NUM_TRAIN:]


def write(items: list[Item], path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{item.expression}="}], "answer": item.answer} for item in items]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_tokenizer(folder: Path) -> Any:
    """Save and return a `tokenizers.Tokenizer` with one token per character and one for each end of a call."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIAL, *CHARACTERS, OPENS, CLOSES]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    calls = "|".join(word.replace("{", r"\{").replace("}", r"\}") for word in (OPENS, CLOSES))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{calls}|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return making.save_tokenizer(tokenizer, SPECIAL, TEMPLATE, folder)
