# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: descriptions with cases, programs for the warm start, and a random model.

`python -m relax_contrib.recipes.code.build FOLDER --seed 0`. Only the share `RIGHT` of the warm start's programs is
right; in the rest, one part fits a different description. So the warm start's pass rate ends near this share for any
seed and length, and reinforcement learning must find out which programs are right.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes import families
from relax_contrib.recipes.code.task import CLOSE, MARKS, OPEN, WORDS, Item, misread, split
from relax_contrib.recipes.making import made
from relax_contrib.recipes.quickstart import model as tiny

PHRASES = (OPEN, CLOSE)
NUM_SHOWN = 8192
RIGHT = 0.4
"""Share of the warm start's programs that are right."""


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names."""
    folder.mkdir(parents=True, exist_ok=True)
    items, random = split(seed), Random(f"code cases {seed}")
    _write(folder / "train.jsonl", [_task(item, random) for item in items.train])
    _write(folder / "eval.jsonl", [_task(item, random) for item in items.held_out])
    _write(folder / "shown.jsonl", [_shown(random.choice(items.train), random) for _ in range(NUM_SHOWN)])
    families.save_tokenizer((*WORDS, *MARKS), folder / "model", PHRASES)
    vocabulary = len(families.SPECIAL) + len(WORDS) + len(MARKS) + len(PHRASES)
    tiny.build_model(seed, vocabulary).save_pretrained(folder / "model")


def _task(item: Item, random: Random) -> dict[str, Any]:
    """Return a row for the reward `code`, which runs the cases."""
    return {**_asked(item), "cases": [item.case(random)]}


def _shown(item: Item, random: Random) -> dict[str, Any]:
    """Return a row for the supervised warm start."""
    written = item if random.random() < RIGHT else misread(item, random)
    return {**_asked(item), "completion": written.program}


def _asked(item: Item) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": item.question}]}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    made(build, __doc__)
