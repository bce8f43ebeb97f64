# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: pictures, tasks, and a random model; the recipe's first stage is the warm start.

`python -m relax_contrib.recipes.colours.build FOLDER --seed 0`.
"""

from __future__ import annotations

from pathlib import Path

from relax_contrib.recipes import families
from relax_contrib.recipes.colours.task import COLOURS, QUESTION, items
from relax_contrib.recipes.making import made
from relax_contrib.recipes.shown import write

WORDS = (*QUESTION.split(), *COLOURS)
NUM_TRAIN, NUM_EVAL = 1024, 256


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names."""
    found = items(folder, seed, NUM_TRAIN + NUM_EVAL)
    write(found[:NUM_TRAIN], folder / "train.jsonl")
    write(found[NUM_TRAIN:], folder / "eval.jsonl")
    families.save_tokenizer(WORDS, folder / "model")
    families.build_model("qwen3_vl", seed, len(families.SPECIAL) + len(WORDS)).save_pretrained(folder / "model")


if __name__ == "__main__":
    made(build, __doc__)
