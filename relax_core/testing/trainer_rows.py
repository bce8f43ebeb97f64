# SPDX-License-Identifier: Apache-2.0
"""Random rows for a trainer under test: groups with a prompt in common, observations, advantages, one version."""

from __future__ import annotations

import numpy as np

from relax_core.api.batch import Ragged, RowBatch, RowId

VOCAB = 64


def make_rows(seed: int = 0, groups: int = 4, size: int = 4, version: int = 0, vocab_size: int = VOCAB) -> RowBatch:
    """Rows of 2 to 16 tokens: a prompt that the group has in common, some observation tokens, an advantage a sample."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, vocab_size, random.integers(1, 6)) for _ in range(groups)]
    tokens = [_continued(random, prompts[index // size], vocab_size) for index in range(groups * size)]
    lengths = np.array([len(row) for row in tokens], np.int64)
    mask = np.concatenate([_mask(random, int(length)) for length in lengths])

    def column(values: np.ndarray) -> Ragged:
        return Ragged(values, lengths)

    return RowBatch(
        tuple(RowId(index // size, index % size, 0, 0) for index in range(groups * size)),
        {
            "tokens": column(np.concatenate(tokens).astype(np.int32)),
            "loss_mask": column(mask),
            "advantages": column(np.repeat(random.normal(size=groups * size), lengths).astype(np.float32)),
            "weight_versions": column(np.where(mask == 1, version, -1).astype(np.int32)),
        },
    )


def _continued(random: np.random.Generator, prompt: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.concatenate([prompt, random.integers(0, vocab_size, random.integers(1, 12))])


def _mask(random: np.random.Generator, length: int) -> np.ndarray:
    mask: np.ndarray = (random.random(length) < 0.7).astype(np.uint8)
    mask[0], mask[-1] = 0, 1
    return mask


def with_values(rows: RowBatch, name: str, values: np.ndarray) -> RowBatch:
    """A token column replaced."""
    return rows.with_columns({name: Ragged(values, rows.columns["tokens"].lengths)})
