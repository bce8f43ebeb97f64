# SPDX-License-Identifier: Apache-2.0
"""Inputs for a trainer under test: random rows, an algorithm and a weight transport."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from relax_core.api.algorithm import Algorithm, Loss, LossBatch, PolicyOutputs, Term
from relax_core.api.batch import Ragged, RowBatch, RowId
from relax_core.api.options import Options
from relax_core.api.weights import (
    Manifest,
    Resident,
    TensorInfo,
    Version,
    WeightTransport,
    combined_fingerprint,
    tensor_fingerprint,
)

VOCAB = 64


def make_rows(seed: int = 0, groups: int = 4, size: int = 4, version: int = 0, vocab_size: int = VOCAB) -> RowBatch:
    """Make rows of 2 to 16 tokens: a prompt shared by the group, some observation tokens, one advantage per sample."""
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
    """Return rows with a token column replaced or added."""
    return rows.with_columns({name: Ragged(values, rows.columns["tokens"].lengths)})


class Reinforce(Algorithm):
    """An algorithm with the losses `-A log p` and, for a critic, `(V - A)^2`.

    Option `skips` (default: True) sets `zero_advantage_skips`.
    """

    fits = ("critic",)

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.zero_advantage_skips = bool(dict(options or {}).get("skips", True))

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        return Loss({"policy": Term(policy.log_probs, -batch.advantages, "tokens")})

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        return Loss({"value": Term((outputs.output("values") - batch.advantages).square())})


class InMemory(WeightTransport):
    """A weight transport that keeps sent tensors in memory and ignores the location."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options or Options())
        self.sent: dict[Version, list[tuple[TensorInfo, np.ndarray]]] = {}

    def send(
        self, version: Version, payload: Any, base: str, tensors: Iterable[tuple[str, np.ndarray, str]], location: str
    ) -> Manifest:
        held = [
            (TensorInfo(name, array.shape, dtype, tensor_fingerprint(array), array.nbytes), np.array(array))
            for name, array, dtype in tensors
        ]
        self.sent[version] = held
        infos = tuple(info for info, _ in held)
        return Manifest(version, payload, infos, location, base, combined_fingerprint(infos))

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        return iter(self.sent[manifest.version])

    def release(self, manifest: Manifest) -> None:
        self.sent.pop(manifest.version, None)
