# SPDX-License-Identifier: Apache-2.0
"""Uses of logits: log-probs of given tokens for trainers, and drawn tokens for engines.

A trainer's tokens go through the model's head in slices whose float32 logits stay under a bound. If a gradient is
needed, the backward pass computes each slice again, so that the logits of a whole batch never exist at once.

An engine draws all rows at once: suppress, temperature, top_k, top_p, one draw by inverse CDF. Log-probs are those of
the distribution from which a token is drawn. Temperature 0 is greedy: the most likely token is taken. Its log-prob is
that at temperature 1 and without top_k and top_p, so that the log-prob stays finite and comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**25
"""Elements in one slice of logits: 128 MiB in float32, large enough that slicing costs no speed."""

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The outputs to compute at every position, in addition to the log-prob of the position's own token."""

    entropy: bool = False
    top_k: int = 0
    """Number k of most likely tokens to return in `top_k_ids` and `top_k_log_probs`, [tokens, k]; 0: none."""
    at: Mapping[str, Tensor] = field(default_factory=dict)
    """Token ids [tokens, k] by name; their log-probs are returned as `log_probs_at:<name>`."""
    measured_entropy: bool = False
    """True: also return the entropy without a gradient, as `measured_entropy`; cheaper than `entropy`."""


def score_distribution(
    features: Tensor, head: Head, ids: Tensor, wanted: Wanted, *,
    vocab_size: int, temperature: float = 1.0, max_logits: int = MAX_LOGITS,
) -> dict[str, Tensor]:  # fmt: skip
    """Return `log_probs` of `ids` and the wanted outputs, by name, under softmax(logits / temperature).

    `features` [tokens, width] go through `head` to logits [tokens, vocab].
    """
    width = max(1, max_logits // vocab_size)
    if len(ids) <= width:
        return _score_slice(features, head, ids, wanted, temperature)
    parts: list[dict[str, Tensor]] = []
    for start in range(0, len(ids), width):
        own = slice(start, start + width)
        part = replace(wanted, at={name: at[own] for name, at in wanted.at.items()})
        parts.append(checkpoint(_score_slice, features[own], head, ids[own], part, temperature, use_reentrant=False))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _score_slice(features: Tensor, head: Head, ids: Tensor, wanted: Wanted, temperature: float) -> dict[str, Tensor]:
    logits = head(features)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if wanted.entropy or wanted.top_k or wanted.at:
        log_probs = functional.log_softmax(logits, dim=-1)
        scored = {"log_probs": log_probs.gather(-1, ids[:, None]).squeeze(-1)}
    else:  # saves the log-probs of the whole vocabulary
        scored = {"log_probs": -functional.cross_entropy(logits, ids, reduction="none")}
    if wanted.measured_entropy:
        with torch.no_grad():  # log Z - sum p x, where log Z = x - log p of any token
            log_z = logits.gather(-1, ids[:, None]).squeeze(-1) - scored["log_probs"]
            scored["measured_entropy"] = (log_z - logits.softmax(-1).mul_(logits).sum(-1)).clamp(min=0)
    if wanted.entropy:
        scored["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    if wanted.top_k:
        scored["top_k_log_probs"], scored["top_k_ids"] = log_probs.topk(wanted.top_k, dim=-1)
    for name, at in wanted.at.items():
        scored[f"log_probs_at:{name}"] = log_probs.gather(-1, at)
    return scored


CHOICES = (("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64), ("num_top", np.int64))
"""Fields of the records that hold each row's sampling options, named as in `GenerateRequest`."""
_CDF_ELEMENTS = 1 << 24
"""Elements of one cumulative sum: 128 MiB in float64."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The sampling options of all rows as tensors. A rule that changes no row is None."""

    temperature: Tensor | None
    """Temperature of each row, [rows, 1]; 1 for greedy rows."""
    greedy: Tensor | None
    """True for rows with temperature 0, bool [rows]."""
    top_k: Tensor | None
    """top_k of each row, [rows, 1]; the vocabulary's size for rows without top_k."""
    top_p: Tensor | None
    """top_p of each row, [rows, 1]; 1 for rows without top_p."""
    suppress: tuple[Tensor, ...] | None
    """Rows and token ids of the logits to suppress: two tensors of equal length."""
    num_top: int
    """Number of most likely tokens to return: the largest number that any row asks for."""

    @classmethod
    def of(
        cls, choices: np.ndarray, suppress: Sequence[tuple[int, ...]], vocab_size: int, device: torch.device
    ) -> Rules:
        """Make the rules from `choices`, records with the fields of `CHOICES`, and each row's suppressed tokens."""
        greedy = choices["temperature"] == 0
        plain = np.float32(1)
        temperature = np.where(greedy, plain, choices["temperature"])
        top_p = np.where(greedy, plain, choices["top_p"])
        top_k = np.where(greedy | (choices["top_k"] == 0), vocab_size, choices["top_k"])

        def column(values: np.ndarray, needed: np.ndarray) -> Tensor | None:
            return torch.from_numpy(values).to(device)[:, None] if needed.any() else None

        pairs = [(row, token) for row, tokens in enumerate(suppress) for token in tokens]
        suppressed = tuple(torch.tensor(pairs, device=device).unbind(1)) if pairs else None
        return cls(
            column(temperature, temperature != 1),
            torch.from_numpy(greedy).to(device) if greedy.any() else None,
            column(top_k, top_k < vocab_size),
            column(top_p, top_p < 1),
            suppressed,
            int(choices["num_top"].max(initial=0)),
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token per row, in host memory."""

    tokens: np.ndarray
    """Ids of the drawn tokens, int64 [rows]."""
    log_probs: np.ndarray
    """Log-probs of the drawn tokens, float64 [rows]; not finite if the model's logits were not finite."""
    top_tokens: np.ndarray | None
    """Ids of the most likely tokens, [rows, num_top], the most likely first; None if `num_top` is 0."""
    top_log_probs: np.ndarray | None


def draw(logits: Tensor, uniforms: np.ndarray, rules: Rules) -> Drawn:
    """Draw a token per row from float32 logits [rows, vocabulary] with one uniform number per row.

    This is the only host synchronisation of a step.
    """
    log_probs = distribution(logits, rules)
    at = torch.from_numpy(uniforms).to(logits.device)
    per_chunk = max(1, _CDF_ELEMENTS // log_probs.shape[1])
    chunks = zip(torch.split(log_probs, per_chunk), torch.split(at, per_chunk), strict=True)
    parts = []
    for chunk, numbers in chunks:
        # The first token whose cumulative probability exceeds the row's number, never a token of probability 0.
        cdf = chunk.double().exp().cumsum(-1)
        first = torch.searchsorted(cdf, (numbers * cdf[:, -1])[:, None], right=True)[:, 0]
        parts.append(first.clamp(max=chunk.shape[1] - 1))
    tokens = torch.cat(parts)
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


def distribution(logits: Tensor, rules: Rules) -> Tensor:
    """Return the log-probs [rows, vocabulary] of the distribution that tokens are drawn from."""
    if rules.suppress is not None:
        logits = logits.index_put(rules.suppress, logits.new_tensor(-torch.inf))
    if rules.temperature is not None:
        logits = logits / rules.temperature
    if rules.top_k is not None or rules.top_p is not None:
        # Keep the tokens that survive top_k, and then top_p among these. The most likely token always survives.
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        kept = torch.ones_like(ordered, dtype=torch.bool)
        if rules.top_k is not None:
            kept &= torch.arange(ordered.shape[1], device=logits.device) < rules.top_k
        if rules.top_p is not None:
            probs = ordered.masked_fill(~kept, -torch.inf).softmax(-1)
            kept &= (probs.cumsum(-1) - probs) < rules.top_p
        logits = logits.masked_fill(~torch.zeros_like(kept).scatter(1, order, kept), -torch.inf)
    return logits.log_softmax(-1)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SEED_MASK = (1 << 64) - 1


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Hash uint64 seeds and non-negative positions, [rows], to uniform float64 numbers in [0, 1 - 2^-52].

    The hash is splitmix64 with a counter. It has no state: a request draws the same numbers regardless of concurrent
    requests, and draws the following numbers if another engine continues it.
    """
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    drawn: np.ndarray = (_mix(_mix(seeds) + counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return drawn


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _A
    z = (z ^ (z >> np.uint64(27))) * _B
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
