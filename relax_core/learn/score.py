# SPDX-License-Identifier: Apache-2.0
"""Log-probs (and entropy) of given tokens under softmax(logits / temperature), without ever holding all logits.

Tokens go through the model's head in slices whose float32 logits stay under a bound; where a gradient is needed the
backward pass computes each slice again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable

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
