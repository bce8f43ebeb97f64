# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: suppress, temperature, top_k, top_p, one draw by inverse CDF; all rows at once.

Log-probs are of the distribution drawn from, renormalised after top_k and top_p. Temperature 0 is greedy: the
likeliest token, its log-prob at temperature 1 and without top_k and top_p, so that it stays a finite, comparable
number.

Uniform numbers by (seed, position): splitmix64 as a counter-based hash, vectorised.

No state: a request draws the same numbers whatever runs beside it, and a continuation elsewhere goes on with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CHOICES = (("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64), ("num_top", np.int64))
"""What rows are drawn by, as fields of their records; named as in `GenerateRequest`."""
_CDF_ELEMENTS = 1 << 24
"""float64 numbers of one cumulative sum: 128 MB."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How each row is drawn; None where no row asks for it."""

    temperature: torch.Tensor | None
    """[rows, 1]; 1 for greedy rows."""
    greedy: torch.Tensor | None
    """bool [rows]."""
    top_k: torch.Tensor | None
    """[rows, 1]; the vocabulary's size where a row has none."""
    top_p: torch.Tensor | None
    """[rows, 1]."""
    suppress: tuple[torch.Tensor, torch.Tensor] | None
    """Pairs (row, token)."""
    num_top: int

    @classmethod
    def of(
        cls, choices: np.ndarray, suppress: Sequence[tuple[int, ...]], vocab_size: int, device: torch.device
    ) -> Rules:
        """From records with the fields of `CHOICES`, and each row's suppressed tokens where any has some."""
        greedy = choices["temperature"] == 0
        plain = np.float32(1)
        temperature = np.where(greedy, plain, choices["temperature"])
        top_p = np.where(greedy, plain, choices["top_p"])
        top_k = np.where(greedy | (choices["top_k"] == 0), vocab_size, choices["top_k"])

        def column(values: np.ndarray, needed: np.ndarray) -> torch.Tensor | None:
            return torch.from_numpy(values).to(device)[:, None] if needed.any() else None

        return cls(
            column(temperature, temperature != 1),
            torch.from_numpy(greedy).to(device) if greedy.any() else None,
            column(top_k, top_k < vocab_size),
            column(top_p, top_p < 1),
            _pairs([(row, token) for row, tokens in enumerate(suppress) for token in tokens], device),
            int(choices["num_top"].max(initial=0)),
        )


def _pairs(pairs: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not pairs:
        return None
    rows, tokens = torch.tensor(pairs, device=device).unbind(1)
    return rows, tokens


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row, on the host."""

    tokens: np.ndarray
    """int64 [rows]."""
    log_probs: np.ndarray
    """float64 [rows]; not finite where the model's output was not."""
    top_tokens: np.ndarray | None
    """[rows, num_top]."""
    top_log_probs: np.ndarray | None


def draw(logits: torch.Tensor, uniforms: np.ndarray, rules: Rules) -> Drawn:
    """Draw from float32 logits [rows, vocabulary] with one uniform a row; the only host synchronisation of a step."""
    log_probs = distribution(logits, rules)
    at = torch.from_numpy(uniforms).to(logits.device)
    per_chunk = max(1, _CDF_ELEMENTS // log_probs.shape[1])
    chunks = zip(torch.split(log_probs, per_chunk), torch.split(at, per_chunk), strict=True)
    tokens = torch.cat([_invert(chunk, u) for chunk, u in chunks])
    if rules.greedy is not None:
        tokens = torch.where(rules.greedy, log_probs.argmax(-1), tokens)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    out = torch.stack([tokens.double(), chosen.double()]).cpu().numpy()
    top = log_probs.topk(rules.num_top) if rules.num_top else None
    return Drawn(
        out[0].astype(np.int64),
        out[1],
        top.indices.cpu().numpy() if top else None,
        top.values.cpu().numpy() if top else None,
    )


def distribution(logits: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Log-probs [rows, vocabulary] of what is drawn from."""
    if rules.suppress is not None:
        logits = logits.index_put(rules.suppress, logits.new_tensor(-torch.inf))
    if rules.temperature is not None:
        logits = logits / rules.temperature
    if rules.top_k is not None or rules.top_p is not None:
        logits = logits.masked_fill(~_kept(logits, rules), -torch.inf)
    return logits.log_softmax(-1)


def _kept(logits: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Which tokens survive top_k, then top_p over what top_k left; the likeliest always does."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if rules.top_k is not None:
        kept &= torch.arange(ordered.shape[1], device=logits.device) < rules.top_k
    if rules.top_p is not None:
        probs = ordered.masked_fill(~kept, -torch.inf).softmax(-1)
        kept &= (probs.cumsum(-1) - probs) < rules.top_p
    return torch.zeros_like(kept).scatter(1, order, kept)


def _invert(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform: never one of probability 0."""
    cdf = log_probs.double().exp().cumsum(-1)
    found = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=log_probs.shape[1] - 1)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SEED_MASK = (1 << 64) - 1


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1 - 2^-52] for uint64 seeds and non-negative positions, [rows]."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    drawn: np.ndarray = (_mix(_mix(seeds) + counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return drawn


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _A
    z = (z ^ (z >> np.uint64(27))) * _B
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
