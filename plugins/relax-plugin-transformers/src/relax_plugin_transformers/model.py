# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face causal model, seen as: right-aligned rows of tokens in, float32 logits out.

Knows masks, positions and how to split work so that memory stays bounded; not requests and not sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from relax_plugin_transformers.cache import RowsCache

_LOGIT_ELEMENTS = 1 << 25
"""float32 logits of one scoring pass: 128 MB."""


class CausalModel:
    """Forward passes over `RowsCache`."""

    def __init__(self, module: torch.nn.Module, max_prefill_tokens: int) -> None:
        config = module.config.get_text_config()
        self.module = module
        self.num_layers = int(config.num_hidden_layers)
        self.vocab_size = int(module.get_input_embeddings().num_embeddings)
        self.device = next(module.parameters()).device
        self._budget = max_prefill_tokens
        windowed = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
        windowed |= bool(getattr(config, "sliding_window", None)) and not hasattr(config, "layer_types")
        self._own_masks = config._attn_implementation == "sdpa" and not windowed

    def new_cache(self, rows: int, columns: int) -> RowsCache:
        return RowsCache(self.num_layers, rows, columns)

    def forward(self, tokens: torch.Tensor, start: torch.Tensor | None, cache: RowsCache, keep: int) -> torch.Tensor:
        """Logits [rows, keep, vocabulary] after `tokens` [rows, columns], which extend the cache.

        `start` [rows]: the column where each row begins; None where all begin at 0.
        """
        past, width = cache.length, tokens.shape[1]
        columns = torch.arange(past, past + width, device=self.device)
        positions = columns.expand(tokens.shape) if start is None else (columns - start[:, None]).clamp(min=0)
        output = self.module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._mask(start, past, width, len(tokens)),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        cache.extent.length = past + width
        return output.logits.float()

    def _mask(self, start: torch.Tensor | None, past: int, width: int, rows: int) -> torch.Tensor | None:
        if start is None and (width == 1 or past == 0):
            return None if self._own_masks else torch.ones(rows, past + width, dtype=torch.long, device=self.device)
        columns = torch.arange(past + width, device=self.device)
        valid = torch.ones(rows, past + width, dtype=torch.bool, device=self.device)
        if start is not None:
            valid = columns >= start[:, None]
        if not self._own_masks:
            return valid.long()
        if width == 1:
            return valid[:, None, None]
        at = columns[past:, None]
        # Padding sees itself: a row of nothing would be NaN, and 0 * NaN poisons what attends to its values.
        return ((columns <= at) & valid[:, None] | (columns == at))[:, None]

    def prefill(self, tokens: torch.Tensor, start: np.ndarray, columns: int) -> tuple[RowsCache, torch.Tensor]:
        """A cache of right-aligned rows [rows, length] with room for `columns`, and the logits after each row."""
        cache = self.new_cache(len(tokens), columns)
        logits = [
            part[:, -1]
            for rows, last, part in self._passes(tokens, start, cache, per_pass=self._budget, keep=1)
            if last
        ]
        return cache, torch.cat(logits)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of each token given those before it, of logits / temperature; the first 0."""
        out: list[list[float]] = [[] for _ in sequences]
        order = sorted((i for i in range(len(sequences)) if sequences[i]), key=lambda i: len(sequences[i]))
        per_pass = max(1, min(self._budget, _LOGIT_ELEMENTS // self.vocab_size))
        for chunk in by_length(order, [len(sequences[i]) for i in order], self._budget):
            tokens, start = aligned([sequences[i] for i in chunk], self.device)
            scored = self._score(tokens, start, per_pass, temperature)
            for row, i in enumerate(chunk):
                out[i] = [0.0, *scored[row, int(start[row]) + 1 :].tolist()]
        return out

    def _score(self, tokens: torch.Tensor, start: np.ndarray, per_pass: int, temperature: float) -> np.ndarray:
        rows, length = tokens.shape
        scored = torch.zeros(rows, length + 1, device=self.device)
        following = torch.nn.functional.pad(tokens, (0, 1))
        cache = self.new_cache(rows, length)
        for part_rows, _, logits in self._passes(tokens, start, cache, per_pass=per_pass, keep=0):
            end = cache.length
            span = slice(end - logits.shape[1] + 1, end + 1)
            wanted = following[part_rows, span].unsqueeze(-1)
            scored[part_rows, span] = (logits / temperature).log_softmax(-1).gather(-1, wanted).squeeze(-1)
        return scored[:, :length].cpu().numpy()

    def _passes(
        self, tokens: torch.Tensor, start: np.ndarray, cache: RowsCache, per_pass: int, keep: int
    ) -> Iterator[tuple[slice, bool, torch.Tensor]]:
        """Row by row, then column by column, at most `per_pass` tokens in the model's hands at a time."""
        rows, length = tokens.shape
        rows_each = max(1, per_pass // length)
        columns_each = length if rows_each > 1 else per_pass
        starts = torch.from_numpy(start).to(self.device) if start.any() else None
        for first in range(0, rows, rows_each):
            part = slice(first, min(first + rows_each, rows))
            cache.extent.first, cache.extent.length = first, 0
            begins = None if starts is None else starts[part]
            for left in range(0, length, columns_each):
                logits = self.forward(tokens[part, left : left + columns_each], begins, cache, keep)
                yield part, left + columns_each >= length, logits
        cache.extent.first = 0


def aligned(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
    """Tokens [rows, longest], right-aligned over zeros, and where each row starts."""
    longest = max(map(len, sequences))
    start = np.array([longest - len(sequence) for sequence in sequences], np.int64)
    tokens = np.zeros((len(sequences), longest), np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, start[row] :] = sequence
    return torch.from_numpy(tokens).to(device), start


def by_length(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Neighbours in length, so that a chunk wastes at most half of its cells and keeps within the budget."""
    chunk: list[int] = []
    real = 0
    for i, length in zip(order, lengths, strict=True):
        cells = (len(chunk) + 1) * length
        if chunk and (cells > budget or cells > 2 * (real + length) + 256):
            yield chunk
            chunk, real = [], 0
        chunk.append(i)
        real += length
    if chunk:
        yield chunk
