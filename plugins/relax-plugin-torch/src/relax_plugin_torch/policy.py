# SPDX-License-Identifier: Apache-2.0
"""A causal language model that scores the tokens of packed rows, exactly: no token sees another row or what follows.

Rows are padded on the right to a rectangle. Attention is causal, so a real token never looks at padding and no mask
is needed; only trained tokens go through the head, so neither prompts nor padding cost logits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relax_core import learn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PROBE_TOLERANCE = 1e-4


class Policy:
    """The model and how to get log-probs from it."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, autocast: bool, max_logits: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._temperature, self._autocast, self._max_logits = temperature, autocast, max_logits
        self._vocab_size: int = model.config.vocab_size
        self._apart = self._head_stands_apart()

    def score(self, batch: learn.PackedBatch, *, entropy: bool = False) -> dict[str, Tensor]:
        """`log_probs` (and `entropy`), [tokens]; 0 without gradient where `loss_mask` is 0."""
        trained = batch.loss_mask.nonzero().squeeze(1)
        with self._precision():
            features = self._features(*_rectangle(batch))
            before = features.index_select(0, _flat_positions(batch)[trained] - 1)
            log_probs, entropies = learn.score_tokens(
                before, self._head, batch.tokens[trained], vocab_size=self._vocab_size, temperature=self._temperature,
                entropy=entropy, max_logits=self._max_logits,
            )  # fmt: skip
        scored = {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropy": entropies}
        empty = log_probs.new_zeros(len(batch.tokens))
        return {name: empty.index_put((trained,), values) for name, values in scored.items()}

    def _features(self, ids: Tensor, width: int) -> Tensor:
        """[rows * width, features]: what the head reads, or the logits themselves."""
        if self._apart:
            features = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        else:
            features = self.model(input_ids=ids, use_cache=False).logits
        return features.reshape(ids.shape[0] * width, -1)

    def _head(self, features: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(features) if self._apart else features

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast)

    @torch.no_grad()
    def _head_stands_apart(self) -> bool:
        """Some models scale or cap logits behind the head; a few tokens through both ways tell."""
        ids = torch.arange(4, device=self.device).remainder(self._vocab_size)[None]
        whole = self.model(input_ids=ids, use_cache=False).logits
        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            return False
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        apart = self.model.get_output_embeddings()(hidden)
        return apart.shape == whole.shape and torch.allclose(apart, whole, atol=_PROBE_TOLERANCE)


def _flat_positions(batch: learn.PackedBatch) -> Tensor:
    """[tokens]: where each packed token lies in the padded rectangle, flattened."""
    starts = batch.lengths.cumsum(0) - batch.lengths
    width = int(batch.lengths.max())
    return torch.arange(len(batch.tokens), device=starts.device) + (
        batch.row_of_token * width - starts[batch.row_of_token]
    )


def _rectangle(batch: learn.PackedBatch) -> tuple[Tensor, int]:
    """Token ids [rows, width], padded on the right with token 0."""
    width = int(batch.lengths.max())
    ids = batch.tokens.new_zeros(batch.num_rows * width)
    ids[_flat_positions(batch)] = batch.tokens
    return ids.view(batch.num_rows, width), width
