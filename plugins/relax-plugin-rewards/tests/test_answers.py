# SPDX-License-Identifier: Apache-2.0
"""Where a response states its answer: boxes that nest, boxes that never close, thoughts that never end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies
from relax_plugin_rewards.answers import after_thinking, boxes, gold_texts, last_box, last_tagged

from relax_core.api import Task


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} }}}", "5"),
        (r"\boxed{1} and \boxed{2", ""),
        (r"\boxed{}", ""),
        ("5", ""),
    ],
)
def test_the_last_complete_box_counts(text: str, content: str) -> None:
    assert last_box(text) == content


LEAVES = strategies.text(alphabet="ab1 ") | strategies.sampled_from([r"\{", r"\}", r"\\"])
BALANCED = strategies.recursive(
    LEAVES, lambda inside: strategies.lists(inside).map(lambda parts: f"{{{''.join(parts)}}}")
)


@given(strategies.text(alphabet="{}ab"), BALANCED, strategies.text(alphabet="{}ab"))
def test_a_box_round_anything_balanced_is_found_again(before: str, content: str, after: str) -> None:
    text = f"{before}\\boxed{{{content}}}{after}"
    assert boxes(text) == [(len(before), len(text) - len(after), content)]
    assert last_box(text) == content.strip()


@pytest.mark.parametrize(
    ("response", "optional", "required"),
    [
        ("so <b>", "so <b>", ""),
        ("<think>a</think>b", "b", "b"),
        ("a</think>b", "b", "b"),
        ("<think>a</think>b</think>c", "c", "c"),
        ("<think>a", "", ""),
        ("<think>a</think>b<think>c", "", ""),
        ("", "", ""),
    ],
)
def test_only_text_after_the_last_thought_counts(response: str, optional: str, required: str) -> None:
    assert after_thinking(response, "optional") == optional
    assert after_thinking(response, "required") == required
    assert after_thinking(response, "ignored") == response


def test_the_last_tag_counts() -> None:
    assert last_tagged("<a>1</a> <a> 2 </a>", "a") == "2"
    assert last_tagged("<a>1", "a") == last_tagged("1</a>", "a") == ""


@pytest.mark.parametrize(("answer", "texts"), [(5, ("5",)), (" 5 ", ("5",)), (["a", 2], ("a", "2"))])
def test_a_gold_answer_is_one_or_a_list(answer: object, texts: tuple[str, ...]) -> None:
    assert gold_texts(Task("t", "?", answer)) == texts


@pytest.mark.parametrize("answer", [None, "", "  ", [], ["a", ""], [None], math.nan])
def test_an_answer_that_is_nothing_is_the_tasks_fault(answer: object) -> None:
    with pytest.raises(ValueError, match="task t has no answer"):
        gold_texts(Task("t", "?", answer))
