# SPDX-License-Identifier: Apache-2.0
"""Reference results for engine tests: a plain forward, without cache, padding or batching, and distributions in plain
loops.

Nothing here imports an engine's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relax_core.api.engine import Delta

TOLERANCE = 1e-4


def plain_log_probs(directory: str, tokens: Sequence[int]) -> np.ndarray:
    """Log-probs [tokens, vocabulary] after each token, one sequence, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    model.eval()
    with torch.no_grad():
        logits: np.ndarray = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return log_softmax(logits)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def agrees(
    model: str, prompt: tuple[int, ...], got: Delta, how: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """Assert that log-probs are those of a plain forward; returns its log-probs after each token."""
    plain = plain_log_probs(model, (*prompt, *got.tokens))
    rows = plain[len(prompt) - 1 : -1]
    rows = rows if how is None else how(rows)
    want = rows[np.arange(len(got.tokens)), list(got.tokens)]
    np.testing.assert_allclose(got.log_probs, want, atol=TOLERANCE, rtol=0)
    return plain


def truncated(plain: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The distribution after top_k, then top_p, row by row in plain loops."""
    out = np.full_like(plain, -np.inf)
    for row, log_probs in enumerate(plain):
        kept = (-log_probs).argsort(kind="stable")[:top_k]
        probs = np.exp(log_probs[kept]) / np.exp(log_probs[kept]).sum()
        count = int(np.searchsorted(probs.cumsum(), top_p)) + 1
        out[row, kept[:count]] = np.log(probs[:count] / probs[:count].sum())
    return out
