# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: two mixtures of reasoning-gym, and the model of the recipe `smollm`.

`python -m relax_contrib.recipes.smollm_gym.build FOLDER --seed 0`. The seed chooses the tasks of both mixtures; the model
is the same for every seed.
"""

from __future__ import annotations

from pathlib import Path

from relax_contrib.recipes.making import made
from relax_contrib.recipes.smollm.build import link_model

SETS = """
[[sets]]
name = "chain_sum"
options = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }

[[sets]]
name = "products"
options = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }

[[sets]]
name = "letter_counting"
options = { min_words = 3, max_words = 4 }
"""
"""Sets whose answers are numbers, of which the model finds some before training."""


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names. Exits if the model's package is missing."""
    link_model(folder)
    (folder / "held-out.gym").write_text(f"size = 192\nseed = {2 * seed + 1}\n{SETS}", encoding="utf-8")
    train = f'size = 512\nseed = {2 * seed}\nexclude = ["held-out.gym"]\n{SETS}'
    (folder / "train.gym").write_text(train, encoding="utf-8")


if __name__ == "__main__":
    made(build, __doc__)
