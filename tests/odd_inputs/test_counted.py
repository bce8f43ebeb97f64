# SPDX-License-Identifier: Apache-2.0
"""Counts of instruction checks: abbreviations, decimals, quotes, lists and other scripts are counted as readers do.

segments.jsonl has texts with their number of sentences or words; counted.jsonl has checks with responses that follow
them and responses that do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_rewards import segmentation
from relax_plugin_rewards.instructions import Instructions

from relax_core.api import Task
from relax_core.testing.samples import trajectory


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text().split("\n") if line]


@pytest.mark.parametrize("unit", ["sentences", "words"])
def test_sentences_and_words_are_counted_as_a_reader_counts_them(unit: str) -> None:
    texts = {row["text"]: row["count"] for row in rows("segments.jsonl") if row["unit"] == unit}
    found = {text: getattr(segmentation, unit)(text) for text in texts}
    assert {text: parts for text, parts in found.items() if len(parts) != texts[text]} == {}


@pytest.mark.parametrize("row", rows("counted.jsonl"), ids=lambda row: row["check"])
def test_a_check_counts_what_its_documentation_says(row: dict[str, Any]) -> None:
    instruction = {"name": row["check"], "arguments": row["arguments"]}
    task = Task("t", "?", None, {"instructions": [instruction]})
    scores = [Instructions().score(task, trajectory(task, text)).value for text in (row["right"], *row["wrong"])]
    assert scores == [1.0, *[0.0] * len(row["wrong"])]
