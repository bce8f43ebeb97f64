# SPDX-License-Identifier: Apache-2.0
"""The choice that a response settles on, as people and models write it."""

from __future__ import annotations

import pytest
from relax_plugin_rewards.choices import Gpqa, MultipleChoice, MultipleChoiceOptions, final_choice, gold_label

from relax_core.api import Task
from relax_core.testing.samples import trajectory

CITIES = {"A": "Paris", "B": "Rome", "C": "Berlin", "D": "Oslo"}


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "(b)",
        "Rome",
        "B) Rome",
        "Answer: B",
        "answer: b",
        "**Answer:** **B**",
        "Final answer: $\\boxed{B}$",
        "Answer:\n\nB",
        "Answer: \uff22",
        r"\boxed{B}",
        r"\fbox{(B)}",
        r"\boxed{\textbf{(B)}\ Rome}",
        r"The answer is \boxed{\text{B}}.",
        "<answer>B</answer>",
        "<answer>\nB. Rome\n</answer>",
        "the answer is (B)",
        "The answer is **(B) Rome**.",
        "The answer is B because A is wrong.",
        "Answer: B (not A)",
        "Answer: B. Option A is wrong because of its river.",
        "Answer: B. One might choose A but that fails.",
        "Answer: B\n\nExplanation: Rome is the capital of Italy.",
        "The answer depends on the century. I would pick B.",
        "I'd go with option B!",
        "If one would choose A, then it fails. Answer: B",
        "Answer: A\n\nWait, that is wrong; another fits.\n\nAnswer: B",
        r"\boxed{A} was my first thought, but now \boxed{B}",
        "Paris is in France, so it is not A.\nB",
    ],
)
def test_the_final_choice_is_read(response: str) -> None:
    assert final_choice(response, CITIES) == "B"


@pytest.mark.parametrize(
    "response",
    [
        "",
        "Rome is the capital of Italy, where the Pope lives.",
        "A, B, C, D",
        "A) Paris\nB) Rome\nC) Berlin\nD) Oslo",
        "Paris\nRome",
        "Answer: A, B, C or D",
        "Answer: A\nAnswer: B",
        "Answer: A\n\nB",
        "The answer is either A or B.",
        r"\boxed{A}\boxed{B}",
        r"\boxed{A, B}",
        r"\boxed{B",
        r"\boxed{}",
        "<answer>A</answer><answer>B</answer>",
        "The answer is a matter of taste.",
        "The answer is A matter of taste.",
        "The answer is not A",
        "Answer: Berlin is nice",
        "Answer: E",
    ],
)
def test_zero_or_several_choices_give_no_answer(response: str) -> None:
    assert final_choice(response, CITIES) is None


def test_texts_of_choices_may_be_marked_up() -> None:
    formulas = {"A": "$x^2$", "B": r"**$\text{half}$**"}
    assert final_choice(r"<answer>$x^2$</answer>", formulas) == "A"
    assert final_choice(r"\boxed{x^2}", formulas) == "A"
    assert final_choice("B) half", formulas) == "B"


def test_labels_may_be_anything_and_texts_may_be_missing() -> None:
    assert final_choice("Answer: 2", {"1": "x", "2": "y"}) == "2"
    assert final_choice("The answer is 12", {"1": "x", "2": "y"}) is None
    assert final_choice("Answer: ii", {"i": "", "ii": ""}) == "ii"


@pytest.mark.parametrize(
    ("answer", "label"), [("B", "B"), ("b", "B"), ("(B)", "B"), (1, "B"), ("Rome", "B"), ("rome", "B"), (0, "A")]
)
def test_a_gold_answer_is_a_label_a_text_or_a_number_from_0(answer: object, label: str) -> None:
    assert gold_label(Task("t", "?"), answer, CITIES) == label


def test_a_number_among_the_labels_or_texts_is_one_of_them() -> None:
    assert gold_label(Task("t", "?"), 2, {"1": "x", "2": "y"}) == "2"
    assert gold_label(Task("t", "?"), "2", {"A": "1", "B": "2", "C": "3"}) == "B"


@pytest.mark.parametrize("answer", ["E", "Madrid", 4, -1, True, "A or B"])
def test_a_gold_answer_that_is_not_a_choice_is_the_tasks_fault(answer: object) -> None:
    with pytest.raises(ValueError, match="task t: answer .* is none of its choices"):
        gold_label(Task("t", "?"), answer, CITIES)


def test_a_gold_text_that_two_choices_have_is_the_tasks_fault() -> None:
    with pytest.raises(ValueError, match="is the text of A and B"):
        gold_label(Task("t", "?"), "x", {"A": "x", "B": "x"})


@pytest.mark.parametrize(
    "choices",
    [["Paris", "Rome"], {"A": "Paris", "B": "Rome"}, {"label": ["A", "B"], "text": ["Paris", "Rome"]}],
)
def test_choices_come_in_the_layouts_of_data_sets(choices: object) -> None:
    task = Task("t", "?", "B", {"choices": choices})
    assert MultipleChoice().score(task, trajectory(task, "Rome")) == 1.0
    assert MultipleChoice().score(task, trajectory(task, "Paris")) == 0.0


@pytest.mark.parametrize("choices", [None, [], {}, "Paris", ["x"] * 27, {"": "x"}])
def test_a_task_without_choices_is_named(choices: object) -> None:
    task = Task("t", "?", "B", {"choices": choices})
    with pytest.raises(ValueError, match="task t has no choices in column 'choices'"):
        MultipleChoice().score(task, trajectory(task, "B"))


def test_letters_can_replace_the_column_of_choices() -> None:
    task = Task("t", "?", "E")
    five = MultipleChoice(MultipleChoiceOptions(letters=5))
    assert five.score(task, trajectory(task, "Answer: E")) == 1.0
    with pytest.raises(ValueError, match="answer 'E' is none of its choices, A, B, C, D"):
        Gpqa().score(task, trajectory(task, "Answer: E"))
