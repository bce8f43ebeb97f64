# SPDX-License-Identifier: Apache-2.0
"""Make the quickstart's teacher for distillation: the warm-started model, trained further to a pass rate of 80 %.

`python -m relax_contrib.recipes.quickstart.teacher FOLDER --seed 0`, in a folder that `build` has filled.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random

from relax_contrib.recipes.making import made, untrained
from relax_contrib.recipes.quickstart import model as tiny
from relax_contrib.recipes.quickstart.build import RATE, warm_up
from relax_contrib.recipes.quickstart.task import split

TARGET, MAX_STEPS = 0.80, 3000


def make(folder: Path, seed: int) -> float:
    """Write the folder `teacher` next to `model`; return the teacher's sampled pass rate, or nan without training."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    items = split(seed)
    tokenizer = tiny.save_tokenizer(folder / "teacher")
    teacher = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    random = Random(f"teacher {seed}")
    reached = math.nan
    if not untrained():
        reached = warm_up(teacher, tokenizer, items.train, items.check, random, RATE, TARGET, MAX_STEPS)
    teacher.save_pretrained(folder / "teacher")
    return reached


def main() -> None:
    reached = made(make, __doc__)
    if not math.isnan(reached):
        print(f"teacher: {reached:.0%} of sampled answers right", file=sys.stderr)


if __name__ == "__main__":
    main()
