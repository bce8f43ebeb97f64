# SPDX-License-Identifier: Apache-2.0
"""Responses to tasks with choices: every form names a choice by label, by text or by both; two choices are none.

Each line of stated_choices.jsonl has choices, responses, and the label that all of these responses state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_rewards.choices import MultipleChoice, final_choice, gold_label

from relax_core.api import Task
from relax_core.testing.samples import trajectory

LINES = (Path(__file__).parent / "stated_choices.jsonl").read_text().split("\n")


@pytest.mark.parametrize(
    "row", map(json.loads, filter(None, LINES)), ids=lambda row: f"{row['choices']} {row['label']}"
)
def test_responses_state_the_choice_in_any_form(row: dict[str, Any]) -> None:
    stated = {response: final_choice(response, row["choices"]) for response in row["responses"]}
    assert {response: label for response, label in stated.items() if label != row["label"]} == {}


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (["Paris", None], "got 'B': None"),
        (["Paris", ["Rome"]], r"got 'B': \['Rome'\]"),
        (["Paris", float("nan")], "got 'B': nan"),
        (["Paris", True], "answer True is a truth value"),
        ({"label": "AB", "text": ["x", "y"]}, "needs a list of labels and one of as many texts"),
        ({"label": ["A", "B"], "text": ["x"]}, "needs a list of labels and one of as many texts"),
        ({"label": ["A", "a"], "text": ["x", "y"]}, "repeats a label"),
        ({"A": None, "B": None}, "has no choices"),
    ],
)
def test_choices_of_another_shape_are_refused_with_their_task(choices: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"task t.*{said}"):
        MultipleChoice().gold(Task("t", "?", "B", {"choices": choices}))


def test_a_choice_that_is_null_in_a_table_is_left_out_and_numbers_are_texts() -> None:
    task = Task("t", "?", "B", {"choices": {"A": 1.0, "B": 2.0, "C": None}})
    assert MultipleChoice().gold(task).responses == ("\\boxed{B}", "Answer: B")
    assert MultipleChoice().score(task, trajectory(task, "Answer: 2")) == 1.0
    assert MultipleChoice().score(task, trajectory(task, "Answer: None")) == 0.0


@pytest.mark.parametrize(
    "choices", [["A. Paris", "B. Rome"], {"(A)": "Paris", "(B)": "Rome"}, {"A.": "A) Paris", "B.": "B) Rome"}]
)
def test_marks_around_labels_and_labels_before_texts_are_no_part_of_them(choices: object) -> None:
    task = Task("t", "?", "B", {"choices": choices})
    for response in ("Answer: B", "Answer: Rome", "(B) Rome", "__B. Rome__", r"\boxed{\textit{B}}"):
        assert MultipleChoice().score(task, trajectory(task, response)) == 1.0
    assert MultipleChoice().score(task, trajectory(task, "Answer: Paris")) == 0.0
    for answer in ("B. Rome", "(B) rome", "Rome"):
        assert MultipleChoice().gold(Task("t", "?", answer, {"choices": choices})).read == "choice B: Rome"


def test_a_gold_text_that_differs_from_others_in_case_alone_is_its_own_choice() -> None:
    assert gold_label(Task("t", "?"), "Aa", {"A": "AA", "B": "Aa", "C": "aa"}) == "B"
