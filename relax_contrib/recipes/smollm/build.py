# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: sums as chats, and the pretrained SmolLM2-135M-Instruct as a Hugging Face folder.

`python -m relax_contrib.recipes.smollm.build FOLDER --seed 0`. The seed chooses the held-out sums; the model is the same
for every seed. The model's folder, 540 MB, is made once and kept in the user's cache.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from relax_contrib.recipes.making import made
from relax_contrib.recipes.smollm.model import RELEASE, cache_folder, gguf_file, link_cached, save_folder
from relax_contrib.recipes.smollm.task import split, write


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names. Exits if the model's package is missing."""
    link_model(folder)
    sums = split(seed)
    write(sums.train, folder / "train.jsonl")
    write(sums.held_out, folder / "eval.jsonl")


def link_model(folder: Path) -> None:
    """Link the model as `model` in a folder, which is made. Exits if the model's package is missing."""
    gguf = gguf_file()
    folder.mkdir(parents=True, exist_ok=True)
    link_cached(partial(save_folder, gguf), cache_folder() / f"smollm-{RELEASE}", folder / "model")


if __name__ == "__main__":
    made(build, __doc__)
