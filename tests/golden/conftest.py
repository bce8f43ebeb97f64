# SPDX-License-Identifier: Apache-2.0
"""The reference as a module, and random rows in the reference's own form."""

import importlib.util
import math
import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def reference():
    spec = importlib.util.spec_from_file_location("reference_grpo", Path(__file__).with_name("reference_grpo.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def draw_rows(reference):
    """Rows of groups of 3 with old, rollout and reference log-probs near the policy's, some beyond the bounds."""

    def draw(seed, *, groups=2, vocab=5, temperature=1.0):
        source = random.Random(seed)
        advantages = reference.advantages([[source.choice([0.0, 0.5, 1.0]) for _ in range(3)] for _ in range(groups)])
        rows = []
        for advantage in (a for group in advantages for a in group):
            length = source.randint(2, 6)
            logits = [[source.gauss(0, 1.5) for _ in range(vocab)] for _ in range(length)]
            tokens = [source.randrange(vocab) for _ in range(length)]
            mask = [0] + [int(source.random() < 0.8) for _ in range(length - 2)] + [1]
            exact = [math.log(reference.softmax(x, temperature)[t]) for x, t in zip(logits, tokens)]
            rows.append(
                {
                    "logits": logits,
                    "tokens": tokens,
                    "mask": mask,
                    "old": [x + source.gauss(0, 0.3) for x in exact],
                    "ref": [x + source.gauss(0, 0.5) for x in exact],
                    "rollout": [x + source.gauss(0, 0.6) for x in exact],
                    "advantage": advantage,
                }
            )
        return rows

    return draw
