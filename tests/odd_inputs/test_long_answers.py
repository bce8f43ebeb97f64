# SPDX-License-Identifier: Apache-2.0
"""Every reader of a policy's text takes linear time, whatever the text is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from gymnasium import spaces
from relax_plugin_chat.tool_calls import FORMATS
from relax_plugin_gymnasium.spaces import UnreadableAction, read_action
from relax_plugin_openenv import environment as openenv
from relax_plugin_reasoning_gym.reward import extract
from relax_plugin_rewards import (
    answers,
    choices,
    code,
    dapo,
    instruction_checks as checks,
    judge,
    remote,
    responses,
    segmentation,
)

from relax_core.api import Tool

LENGTH = 1 << 18
"""A linear reader takes some milliseconds for so many characters, a quadratic one minutes."""


def units(*texts: str) -> dict[str, str]:
    """Return long texts of one repeated unit."""
    return {text: text * (LENGTH // len(text)) for text in texts}


def around(before: str, unit: str, after: str) -> dict[str, str]:
    """Return a long run of a unit between two texts."""
    return {f"{before}{unit}...{after}": before + unit * (LENGTH // len(unit)) + after}


def nested(opens: str, inner: str, closes: str) -> dict[str, str]:
    """Return a deep nest of one pair of brackets."""
    depth = LENGTH // len(opens + closes)
    return {f"{opens}...{inner}...{closes}": opens * depth + inner + closes * depth}


MARKS = units("<think>", "</think>", "<answer>", "</answer>", "<action>", "```x\n", "}", "9", " ", "\n")
BOXES = {
    **units("\\boxed{", "\\boxed{}"),
    **nested("\\boxed{", "1", "}"), **nested("{", "\\boxed{1}", "}"), **around("\\boxed{", " ", "\\boxed{1}}"),
    **around("\\boxed{1}", " ", "x\\boxed{2}"), **around("\\boxed{", "9", "}"),
}  # fmt: skip
PHRASES = {**units("answer is ", "Answer:\n"), **around("answer is", "\n", ""), **around("", "-\n", "A")}
CALLS = {
    **around('<tool_call>{"', "</think>", ""), **around("<function=f><parameter=a>", "</think>", ""),
    **around('[f(a="', "</think>", ""), **around("[f(a='", "<think></think>", ""),
    **units("<tool_call>", "</think>[f(", "[TOOL_CALLS]", '<|python_tag|>{"a":'),
}  # fmt: skip
OPTIONS = partial(judge.JudgeOptions, engine="judge", template="{response}")
CHOICES = {"A": "Rome", "B": "New York"}
READERS: dict[str, tuple[Callable[[str], object], dict[str, str]]] = {
    "after_thinking": (partial(answers.after_thinking, think="optional"), MARKS),
    "last_tagged": (partial(answers.last_tagged, tag="answer"), MARKS),
    "unboxed": (answers.unboxed, nested("\\boxed{", "1", "}")),
    "last_box": (answers.last_box, BOXES),
    "dapo": (lambda text: dapo.normalised(dapo.stated_answer(text)), PHRASES),
    "final_answer": (partial(responses.final_answer, words=True), PHRASES | around("\\boxed{1}", " ", "x\\boxed{2}")),
    "final_choice": (partial(choices.final_choice, choices=CHOICES), BOXES | PHRASES | units("<answer>", "B or ")),
    "code": (partial(code.find_program, language="auto"), MARKS | around("```x\n", "a\n", "")),
    "judge numbers": (partial(judge.verdict, options=OPTIONS()), around("", "9", "x") | units("1.", "-")),
    "judge keys": (partial(judge.verdict, options=OPTIONS(keys={"a": 1.0})), nested('{"a":', "1", "}") | units("{", '{"a"')),
    "remote": (remote.read_score, nested("[", "", "]") | units("9")),
    "reasoning-gym tags": (partial(extract, form="tags"), MARKS),
    "reasoning-gym box": (partial(extract, form="boxed"), nested("\\boxed{", "1", "}")),
    "openenv": (lambda text: openenv._MARKED.findall(text) or openenv._FENCED.findall(text), MARKS | around("```", "\n", "")),
    "gymnasium": (partial(read_action, spaces.Discrete(3), names=("left", "right", "up")), MARKS),
    "gymnasium JSON": (partial(read_action, spaces.Box(-1, 1, (2,)), names=()), MARKS | nested("[", "1", "]")),
}  # fmt: skip
READERS |= {f"calls {name}": (partial(each.parse, tools=[Tool("f")]), CALLS) for name, each in FORMATS.items()}
FORMS = {
    **around("", ".", "x"), **around("", ". ", ".x"), **around('"', "a", ""), **around("<<", "a", ""), **around("P", ".", "x"),
    **around("-", "* ", "x"), **units("*a", "[a", "**", "\n "),
}  # fmt: skip
READERS |= {
    "sentences": (segmentation.sentences, FORMS),
    "bullets": (partial(checks.number_bullet_lists, num_bullets=1), FORMS),
    "highlights": (partial(checks.number_highlighted_sections, num_highlights=1), FORMS),
    "paragraphs": (partial(checks.number_paragraphs, num_paragraphs=1), FORMS),
    "placeholders": (partial(checks.number_placeholders, num_placeholders=1), FORMS),
    "postscript": (partial(checks.postscript, postscript_marker="P.S."), FORMS),
    "quotation": (checks.quotation, FORMS), "title": (checks.title, FORMS),
}  # fmt: skip


@pytest.mark.timeout(30)  # a quadratic reader takes longer
@pytest.mark.parametrize("reader", READERS)
def test_a_long_text_is_read_in_linear_time(reader: str) -> None:
    read, texts = READERS[reader]
    for text in texts.values():
        with suppress(ValueError, UnreadableAction):
            read(text)
