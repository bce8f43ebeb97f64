# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: sounds, tasks, and a random model; the recipe's first stage is the warm start.

`python -m relax_contrib.recipes.digits.build FOLDER --seed 0`.
"""

from __future__ import annotations

from pathlib import Path

from relax_contrib.recipes import families
from relax_contrib.recipes.digits.task import QUESTION, items, speakers
from relax_contrib.recipes.digits.voice import WORDS as DIGITS
from relax_contrib.recipes.making import made
from relax_contrib.recipes.shown import write

WORDS = (*QUESTION.split(), *DIGITS)
NUM_TRAIN, NUM_EVAL = 1024, 256
NUM_VOICES, NUM_NEW_VOICES = 10, 3


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names."""
    voices = speakers(seed, NUM_VOICES + NUM_NEW_VOICES)
    write(items(folder, "train", voices[:NUM_VOICES], seed, NUM_TRAIN), folder / "train.jsonl")
    write(items(folder, "eval", voices[NUM_VOICES:], seed, NUM_EVAL), folder / "eval.jsonl")
    families.save_tokenizer(WORDS, folder / "model")
    families.build_model("qwen3_omni_moe_thinker", seed, len(families.SPECIAL) + len(WORDS)).save_pretrained(
        folder / "model"
    )


if __name__ == "__main__":
    made(build, __doc__)
