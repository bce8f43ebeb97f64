# SPDX-License-Identifier: Apache-2.0
"""Log-probs (and entropy) of given tokens under softmax(logits / temperature), without ever holding all logits.

Tokens go through the model's head in slices whose float32 logits stay under a bound; where a gradient is needed the
backward pass computes each slice again instead of keeping it.

More of a position's distribution than one token's log-prob: its likeliest tokens, and the log-probs of given ones.

As `score_tokens`: of softmax(logits / temperature), in slices whose float32 logits stay under a bound, each computed again
in the backward pass, so that the logits of a whole batch never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**25
"""Elements of one slice of logits: 128 MiB in float32, large enough that slicing costs no speed."""

Head = Callable[[Tensor], Tensor]
Scored = tuple[Tensor, Tensor | None]


def score_tokens(
    features: Tensor,
    head: Head,
    ids: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    entropy: bool = False,
    max_logits: int = MAX_LOGITS,
) -> Scored:
    """`features` [tokens, width] through `head` to logits [tokens, vocab]; log-probs of `ids` and entropy, [tokens] each."""
    width = max(1, max_logits // vocab_size)
    if len(ids) <= width:
        return _slice(features, head, ids, temperature, entropy)
    parts = [
        checkpoint(
            _slice, features[at : at + width], head, ids[at : at + width], temperature, entropy, use_reentrant=False
        )
        for at in range(0, len(ids), width)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if entropy else None


def _slice(features: Tensor, head: Head, ids: Tensor, temperature: float, entropy: bool) -> Scored:
    logits = head(features)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if not entropy:
        return -functional.cross_entropy(logits, ids, reduction="none"), None
    log_probs = functional.log_softmax(logits, dim=-1)
    return log_probs.gather(-1, ids[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to give of every position, beside the log-prob of its own token."""

    entropy: bool = False
    top_k: int = 0
    """`top_k_ids` and `top_k_log_probs`, [tokens, k], the likeliest first."""
    at: Mapping[str, Tensor] = field(default_factory=dict)
    """By name: ids [tokens, k] whose log-probs to give, as `log_probs_at:<name>`."""

    def part(self, start: int, stop: int) -> Wanted:
        """The same of some positions."""
        return Wanted(self.entropy, self.top_k, {name: ids[start:stop] for name, ids in self.at.items()})


def score_distribution(
    features: Tensor,
    head: Head,
    ids: Tensor,
    wanted: Wanted,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    max_logits: int = MAX_LOGITS,
) -> dict[str, Tensor]:
    """`features` [tokens, width] through `head` to logits [tokens, vocab]: `log_probs` of `ids` and what is wanted, by name."""
    width = max(1, max_logits // vocab_size)
    if len(ids) <= width:
        return _distribution_slice(features, head, ids, wanted, temperature)
    parts: list[dict[str, Tensor]] = [
        checkpoint(
            _distribution_slice, features[at : at + width], head, ids[at : at + width], wanted.part(at, at + width),
            temperature,
            use_reentrant=False,
        )
        for at in range(0, len(ids), width)
    ]  # fmt: skip
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _distribution_slice(
    features: Tensor, head: Head, ids: Tensor, wanted: Wanted, temperature: float
) -> dict[str, Tensor]:
    logits = head(features)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = functional.log_softmax(logits / temperature, dim=-1)
    scored = {"log_probs": log_probs.gather(-1, ids[:, None]).squeeze(-1)}
    if wanted.entropy:
        scored["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    if wanted.top_k:
        scored["top_k_log_probs"], scored["top_k_ids"] = log_probs.topk(wanted.top_k, dim=-1)
    for name, own in wanted.at.items():
        scored[f"log_probs_at:{name}"] = log_probs.gather(-1, own)
    return scored
