# SPDX-License-Identifier: Apache-2.0
"""Build the quickstart, and a judge for it: a model of the same size that tells right answers from wrong ones.

`python -m relax_contrib.recipes.judged.build FOLDER --seed 0`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random

from relax_contrib.recipes.judged.task import questions
from relax_contrib.recipes.making import made, untrained
from relax_contrib.recipes.quickstart import build as quickstart, model as tiny
from relax_contrib.recipes.quickstart.task import split

TARGET, MAX_STEPS = 0.95, 3000
"""Share of sampled verdicts on new questions that are right, which ends the judge's training."""
NUM_SHOWN, NUM_CHECK = 20_000, 512


def build(folder: Path, seed: int) -> float:
    """Write all files that the recipe's TOML names; return the judge's share of right verdicts, or nan without training."""
    quickstart.build(folder, seed)
    items, random = split(seed), Random(f"judge {seed}")
    tokenizer = tiny.save_tokenizer(folder / "judge")
    judge = tiny.build_model(seed + 1)
    reached = math.nan
    if not untrained():
        shown, check = questions(items.train, random, NUM_SHOWN), questions(items.check, random, NUM_CHECK)
        reached = quickstart.warm_up(judge, tokenizer, shown, check, random, target=TARGET, max_steps=MAX_STEPS)
    judge.save_pretrained(folder / "judge")
    return reached


def main() -> None:
    reached = made(build, __doc__)
    if not math.isnan(reached):
        print(f"judge: {reached:.0%} of sampled verdicts right", file=sys.stderr)


if __name__ == "__main__":
    main()
