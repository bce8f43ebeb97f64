# SPDX-License-Identifier: Apache-2.0
"""Builds the recipe in a folder: pictures, tasks, and a random model that its first stage warms up.

`python -m relax_contrib.recipes.colours.build FOLDER --seed 0`.
"""

from __future__ import annotations

from pathlib import Path

from relax_contrib.recipes.colours import model as tiny
from relax_contrib.recipes.colours.task import SIDE, split, write
from relax_contrib.recipes.making import made


def build(folder: Path, seed: int) -> None:
    """Everything the recipe's TOML names."""
    items = split(folder, seed)
    write(items.train, folder / "train.jsonl")
    write(items.held_out, folder / "eval.jsonl")
    tiny.save_tokenizer(folder / "model")
    tiny.save_processor(folder / "model", SIDE)
    tiny.build_model(seed).save_pretrained(folder / "model")


if __name__ == "__main__":
    made(build, __doc__)
