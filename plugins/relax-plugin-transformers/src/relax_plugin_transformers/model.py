# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face causal model: right-aligned rows of tokens in, float32 logits out.

This module computes masks and positions, and splits work so that memory stays bounded. Requests and sampling are in
`batch.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from relax_core.api.family import Routing
from relax_core.api.modality import ProcessedMedia
from relax_core.learn.huggingface import MediaInputs, RouterRecorder, conserved, routing_of
from relax_core.media.store import MediaStore
from relax_plugin_transformers.cache import RowsCache

Shown = tuple[ProcessedMedia, ...]
"""The processed media of one row."""
_LOGIT_ELEMENTS = 1 << 25
"""Maximum number of float32 logits in one scoring pass: 128 MiB."""


class CausalModel:
    """A causal model whose forward passes read and extend a `RowsCache`."""

    def __init__(self, module: torch.nn.Module, max_prefill_tokens: int, media: MediaStore | None = None) -> None:
        config = module.config.get_text_config()
        self.module = module
        self._kinds = layer_kinds(config)
        self.vocab_size = int(module.get_input_embeddings().num_embeddings)
        self.device = next(module.parameters()).device
        self._budget = max_prefill_tokens
        self._media, self._inputs = media, MediaInputs(module)
        self._holds = self._inputs.holds
        self._cuts = "logits_to_keep" in inspect.signature(module.forward).parameters
        """True if the model can compute logits for the last columns alone."""
        windowed = any(kind != "full_attention" for kind in self._kinds)
        windowed |= bool(getattr(config, "sliding_window", None)) and not hasattr(config, "layer_types")
        self.routing_recorder = RoutingRecorder(module)
        self._own_masks = config._attn_implementation == "sdpa" and not windowed

    def new_cache(self, rows: int, columns: int) -> RowsCache:
        return RowsCache(self._kinds, rows, columns)

    def media_of(self, keys: Sequence[str]) -> Shown:
        """Return processed media from the run's media store."""
        if keys and self._media is None:
            raise ValueError("a request has media, but this engine was started without a media store")
        return tuple(self._media.get(key) for key in keys) if self._media is not None else ()

    def misplaced(self, tokens: Sequence[int], keys: Sequence[str]) -> str:
        """Return the reason why placeholders in `tokens` do not match the media; empty if they do."""
        return conserved(tokens, self.media_of(keys), self._holds) if keys or self._holds else ""

    def forward(
        self, tokens: torch.Tensor, start: torch.Tensor | None, cache: RowsCache, keep: int,
        jumps: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run `tokens` [rows, columns] and append them to the cache; return logits of the last `keep` columns (0: all).

        `start` [rows]: the column where each row begins; None: all rows begin at 0. `jumps` [rows]: position minus
        column after a row's media, fractional for models with fractional video times; None: no row has media.
        """
        positions = self._columns(tokens, start, cache)
        if jumps is not None:
            positions = (positions + jumps[:, None]).expand(3, *tokens.shape)
        return self._run(tokens, start, cache, keep, {"position_ids": positions})

    def _look(
        self, tokens: torch.Tensor, start: torch.Tensor | None, cache: RowsCache, keep: int, shown: Sequence[Shown]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run whole rows with media; return logits, and the `jumps` [rows] for later calls of `forward`."""
        columns = torch.arange(tokens.shape[1], device=self.device)
        valid = columns >= (0 if start is None else start[:, None])
        inputs, jumps = self._inputs.of(tokens, valid.expand(tokens.shape), shown)
        inputs.setdefault("position_ids", self._columns(tokens, start, cache))
        return self._run(tokens, start, cache, keep, inputs), jumps

    def _columns(self, tokens: torch.Tensor, start: torch.Tensor | None, cache: RowsCache) -> torch.Tensor:
        """Return the position of each token in its row, [rows, columns]."""
        columns = torch.arange(cache.length, cache.length + tokens.shape[1], device=self.device)
        return columns.expand(tokens.shape) if start is None else (columns - start[:, None]).clamp(min=0)

    def _run(
        self, tokens: torch.Tensor, start: torch.Tensor | None, cache: RowsCache, keep: int,
        inputs: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        past, width = cache.length, tokens.shape[1]
        cache.extent.rows = len(tokens)
        asked = {
            "input_ids": tokens, "attention_mask": self._mask(start, past, width, len(tokens)), "past_key_values": cache,
            "use_cache": True, **inputs,
        }  # fmt: skip
        if self._cuts:
            logits = self.module(**asked, logits_to_keep=keep).logits
        else:
            hidden = self.module.base_model(**asked).last_hidden_state
            logits = self.module.get_output_embeddings()(hidden[:, -keep:])
        self.routing_recorder.passed(cache.extent.first, past, len(tokens))
        cache.extent.length = past + width
        return logits.float()  # type: ignore[no-any-return]

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
        # Padding sees itself: attention over nothing gives NaN, and 0 * NaN spoils the tokens that attend to it.
        return ((columns <= at) & valid[:, None] | (columns == at))[:, None]

    def prefill(
        self, tokens: torch.Tensor, start: np.ndarray, columns: int, keys: Sequence[Sequence[str]] = ()
    ) -> tuple[RowsCache, torch.Tensor, np.ndarray]:
        """Run right-aligned rows [rows, length]; return their cache, the logits after each row, and their `jumps`.

        The cache has room for `columns`. `jumps` [rows] are for `forward`. `keys`: media keys of each row.
        """
        cache = self.new_cache(len(tokens), columns)
        if any(keys):
            return self._prefill_shown(tokens, start, cache, [self.media_of(row) for row in keys])
        logits = [
            part[:, -1]
            for rows, last, part in self._passes(tokens, start, cache, per_pass=self._budget, keep=1)
            if last
        ]
        return cache, torch.cat(logits), np.zeros(len(tokens))

    def _prefill_shown(
        self, tokens: torch.Tensor, start: np.ndarray, cache: RowsCache, shown: Sequence[Shown]
    ) -> tuple[RowsCache, torch.Tensor, np.ndarray]:
        """Run rows with media. A row is never split between passes, since a model needs all of its media at once."""
        logits, jumps = [], []
        each = max(1, self._budget // tokens.shape[1])
        for first in range(0, len(tokens), each):
            part = slice(first, min(first + each, len(tokens)))
            cache.extent.first, cache.extent.length = first, 0
            begins = torch.from_numpy(start[part]).to(self.device) if start[part].any() else None
            after, ahead = self._look(tokens[part], begins, cache, 1, shown[part])
            logits.append(after[:, -1])
            jumps.append(ahead.cpu().numpy())
        cache.extent.first = 0
        return cache, torch.cat(logits), np.concatenate(jumps)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return each token's log-prob given its predecessors, from logits / temperature; 0 for a first token."""
        self.routing_recorder.watch(False)
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
        """Run forward passes over at most `per_pass` tokens; yield (rows, True if their last pass, logits) of each.

        A pass covers several whole rows, or a part of one long row.
        """
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


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer of a language model."""
    count = int(config.num_hidden_layers)
    return list(getattr(config, "layer_types", None) or ["full_attention"] * count)[:count]


def aligned(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
    """Return tokens [rows, longest], right-aligned and padded with 0, and the column where each row starts."""
    longest = max(map(len, sequences))
    start = np.array([longest - len(sequence) for sequence in sequences], np.int64)
    tokens = np.zeros((len(sequences), longest), np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, start[row] :] = sequence
    return torch.from_numpy(tokens).to(device), start


def by_length(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Split `order` into chunks of at most `budget` padded tokens, of which at most half plus 128 are padding."""
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


class RoutingRecorder:
    """A recorder of the experts that each token visits, by row and column. It records while `on` is True."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.routing: Routing | None = routing_of(module)
        self._recorder = None if self.routing is None else RouterRecorder(module, self.routing)
        self._pieces: list[tuple[int, int, np.ndarray]] = []

    @property
    def on(self) -> bool:
        return self._recorder is not None and self._recorder.on

    def watch(self, wanted: bool) -> None:
        """Turn recording on or off from the next pass on, and drop earlier records."""
        self._pieces.clear()
        if self._recorder is not None:
            self._recorder.on = wanted

    def passed(self, row: int, column: int, rows: int) -> None:
        """Record a finished pass over `rows` rows, which began at `row` and `column`."""
        if self._recorder is not None and self._recorder.on:
            seen = self._recorder.take()
            self._pieces.append((row, column, seen.reshape(rows, -1, *seen.shape[1:])))

    def take(self) -> np.ndarray:
        """Return the routed experts of all passes since the last call, [rows, positions, layers, top_k]."""
        pieces, self._pieces = self._pieces, []
        rows = max(row + len(seen) for row, _, seen in pieces)
        first = min(column for _, column, _ in pieces)
        columns = max(column + seen.shape[1] for _, column, seen in pieces) - first
        whole = np.zeros((rows, columns, *pieces[0][2].shape[2:]), pieces[0][2].dtype)
        for row, column, seen in pieces:
            whole[row : row + len(seen), column - first : column - first + seen.shape[1]] = seen
        return whole
