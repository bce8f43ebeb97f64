# SPDX-License-Identifier: Apache-2.0
"""A canary: a few tokens made from a fixed seed, with the log-probs that the trainer gives them now.

Log-probs of trainers are of logits / temperature, and can't be turned back; so the temperature travels with them.
"""

from __future__ import annotations

from random import Random

import numpy as np

from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.weights import Canary
from relax_core.roles.trainer_group import TrainerGroup

_TOKENS = 48
_SEED = 0xCA9A27


async def make_canary(trainer: TrainerGroup, temperature: float) -> Canary:
    """Between two updates: what the trainer's weights of this moment say."""
    random, vocabulary = Random(_SEED), int(trainer.facts["vocab_size"])
    tokens = [random.randrange(vocabulary) for _ in range(_length(trainer))]
    columns = await trainer.forward(_rows(tokens, trainer.size), ("log_probs",))
    log_probs = next(iter(columns["log_probs"].rows()))
    return Canary(tuple(tokens), (0.0, *(float(value) for value in log_probs[1:])), temperature)


def _length(trainer: TrainerGroup) -> int:
    return min(_TOKENS, int(trainer.facts.get("max_context") or _TOKENS))


def _rows(tokens: list[int], count: int) -> RowBatch:
    """A row a rank, so that each has work; all alike."""
    mask = [0] + [1] * (len(tokens) - 1)
    return RowBatch(
        tuple(RowId(-1 - number, 0, 0, 0) for number in range(count)),
        {
            "tokens": Ragged.of([np.array(tokens, np.int32)] * count),
            "loss_mask": Ragged.of([np.array(mask, np.uint8)] * count),
        },
    )
