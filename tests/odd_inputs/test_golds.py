# SPDX-License-Identifier: Apache-2.0
"""Golds of `maths`: read whole or refused. Each line of the data has a gold, and right and wrong responses.

golds.jsonl holds answers alone, each of which is tried boxed and plain; final_answers.jsonl holds sentences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_rewards.maths import Maths

from relax_core.api import Task
from relax_core.testing.samples import trajectory


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text().split("\n") if line]


ROWS = rows("golds.jsonl")
READ = [row for row in ROWS if "refused" not in row]
REFUSED = [row for row in ROWS if "refused" in row]
MATHS = Maths()


def score(gold: Any, response: str) -> float:
    task = Task("t", "?", gold)
    return MATHS.score(task, trajectory(task, response))


@pytest.mark.parametrize("row", READ, ids=lambda row: repr(row["gold"]))
def test_a_gold_equals_itself_and_no_piece_of_itself_boxed_and_plain(row: dict[str, Any]) -> None:
    gold = MATHS.gold(Task("t", "?", row["gold"]))
    responses = [
        *gold.responses,
        *(form.format(answer) for answer in row.get("right", ()) for form in ("{}", "\\boxed{{{}}}")),
    ]
    assert {response: score(row["gold"], response) for response in responses} == dict.fromkeys(responses, 1.0), (
        gold.read
    )
    pieces = [form.format(piece) for piece in row.get("wrong", ()) for form in ("{}", "\\boxed{{{}}}")]
    assert {piece: score(row["gold"], piece) for piece in pieces} == dict.fromkeys(pieces, 0.0), gold.read


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: repr(row["gold"]))
def test_a_gold_that_cannot_be_read_whole_is_refused_for_any_response(row: dict[str, Any]) -> None:
    for response in ("42", "", str(row["gold"])):
        with pytest.raises(ValueError, match=row["refused"]):
            score(row["gold"], response)


@pytest.mark.parametrize("row", rows("final_answers.jsonl"), ids=lambda row: repr(row["gold"]))
def test_the_final_answer_of_a_sentence_is_read_whole(row: dict[str, Any]) -> None:
    assert [one for one in row.get("right", ()) if score(row["gold"], one) != 1.0] == []
    assert [one for one in row["wrong"] if score(row["gold"], one) != 0.0] == []
