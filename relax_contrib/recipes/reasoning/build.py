# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: tasks of reasoning-gym, and a random model with a vocabulary of characters.

`python -m relax_contrib.recipes.reasoning.build FOLDER --seed 0`. A row has the columns from which the reward
`reasoning-gym` recreates the task, and the set's answer for the warm start. Held-out questions never occur in training.
A text that all questions of a set share is one token, which keeps prompts short.
"""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from relax_contrib.recipes.making import made
from relax_contrib.recipes.quickstart import model as tiny

NUM_DRAWN, NUM_EVAL = 1024, 64
"""For each set: number of tasks drawn (equal questions are then merged), and number of these that are held out."""
CHARACTERS = tiny.CHARACTERS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ\"'/%$#@&_ë"


class GymSet(NamedTuple):
    name: str
    options: dict[str, int]
    phrases: tuple[str, ...]
    """Texts that all questions of the set share; each is one token."""


SETS = (
    GymSet("spell_backward", {"min_word_len": 3, "max_word_len": 4}, (
        "Spell this word backward (example: sun -> nus): ",
    )),
    GymSet("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, (
        "State the final answer to the following arithmetic problem: ",
    )),
    GymSet("letter_counting", {"min_words": 1, "max_words": 2}, (
        'How many times does the letter "', '" appear in the text: "',
    )),
    GymSet("gcd", {"min_value": 1, "max_value": 20}, (
        "Find the Greatest Common Divisor (GCD) of these numbers: ", ". Give only the GCD as your final answer.",
    )),
)  # fmt: skip
PHRASES = tuple(phrase for one in SETS for phrase in one.phrases)


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(f"reasoning {seed}")
    rows = [_rows(one, random.getrandbits(31)) for one in SETS]
    trained = [
        list(islice(cycle(drawn[NUM_EVAL:]), NUM_DRAWN)) for drawn in rows
    ]  # repeats questions, so that every set has NUM_DRAWN rows
    _write(folder / "train.jsonl", [row for drawn in trained for row in drawn])
    _write(folder / "eval.jsonl", [row for drawn in rows for row in drawn[:NUM_EVAL]])
    tiny.save_tokenizer(folder / "model", CHARACTERS, PHRASES)
    vocabulary = len(tiny.SPECIAL) + len(CHARACTERS) + len(PHRASES)
    tiny.build_model(seed, vocabulary).save_pretrained(folder / "model")


def _rows(one: GymSet, seed: int) -> list[dict[str, Any]]:
    """Return the rows of a set, one for each distinct question."""
    from reasoning_gym import create_dataset

    recipe = {"set": one.name, "seed": seed, "size": NUM_DRAWN, "level": None, "options": one.options}
    entries = create_dataset(one.name, seed=seed, size=NUM_DRAWN, **one.options)
    rows = {
        entry["question"]: {
            "prompt": [{"role": "user", "content": entry["question"]}], "answer": entry["answer"],
            "completion": entry["answer"], "set": one.name, "recipe": {**recipe, "index": index},
        }
        for index, entry in enumerate(entries)
    }  # fmt: skip
    return list(rows.values())


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    made(build, __doc__)
