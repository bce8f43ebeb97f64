# SPDX-License-Identifier: Apache-2.0
"""Scoring of packed rows by a causal language model. The scores are exact: a token sees only its own row's past.

Only trained tokens go through the head, so no logits are computed for prompts and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from relax_core import learn
from relax_core.api import LOG_PROBS, ConfigError, Output, Ragged, RowBatch, RowId
from relax_core.trainer_kit.chunk_rows import wanted
from relax_core.trainer_kit.model_folder import FIELD
from relax_core.trainer_kit.row_media import RowMedia
from relax_plugin_torch.flops import FlopCounter
from relax_plugin_torch.layout import Layout, PrefixTree, by_row, one_line
from relax_plugin_torch.routing_replay import RoutingReplay, prefix_keys
from relax_plugin_torch.setup import FLASH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOLERANCE = 1e-4
_MEAN_TOLERANCE = 0.1
"""Mean difference of log-probs that the rounding of 16-bit logits can explain; that of other neighbours is larger."""
_LEAK = 1e-2
"""Change of logits, relative to the largest, that proves that a token sees later tokens; rounding changes far less."""
Scores = dict[str, Tensor]
_NEVER = -1e9
"""Logit of suppressed tokens; finite, so that no gradient is NaN."""
_NOTHING: Mapping[str, Tensor] = {}
_MAX_MASK = 2**24
"""Elements of an attention mask beyond which making the mask costs more than shared prompts save."""


class Rectangle(Protocol):
    """The size of a layout: its number of lines, and the tokens in a line."""

    @property
    def lines(self) -> int: ...
    @property
    def width(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations per token: in the weights, and in attention for each token that the token sees."""

    weights: float
    attention: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        config = model.config
        weights = (
            sum(parameter.numel() for parameter in model.parameters()) - model.get_input_embeddings().weight.numel()
        )
        layers, hidden = getattr(config, "num_hidden_layers", 1), getattr(config, "hidden_size", 1)
        return cls(2.0 * weights, 4.0 * layers * hidden)

    def mostly_attention(self, width: int) -> bool:
        """Return True if attention dominates at this row length: then sharing prompts costs more than it saves.

        Under the mask of a prefix tree, attention computes every pair of tokens in a line.
        """
        return self.attention * width > self.weights

    def favour_tree(self, plain: Rectangle, tree: Rectangle) -> bool:
        """Return True if the prefix tree layout costs less than the plain layout with one row per line."""
        if self.mostly_attention(plain.width) or tree.lines * tree.width**2 > _MAX_MASK:
            return False
        return self._cost(plain, plain.width // 2) > self._cost(tree, tree.width)

    def _cost(self, size: Rectangle, seen: int) -> float:
        return size.lines * size.width * (self.weights + self.attention * seen)


class Policy:
    """A model that scores packed batches: log-probs, entropy and further outputs of the trained tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        autocast: torch.dtype | None,
        max_logits: int,
        share_prefixes: bool,
        row_media: RowMedia | None = None,
        suppress: tuple[int, ...] = (),
        routing_replay: RoutingReplay | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.device = next(model.parameters()).device
        self.counter: FlopCounter | None = None
        """Counter of the work of all passes from now on; None: they are not counted."""
        self._temperature, self._autocast, self._max_logits = temperature, autocast, max_logits
        text = model.config.get_text_config()
        self._vocab_size: int = text.vocab_size
        self._row_media = row_media or RowMedia(model, "")
        self.routing_replay = routing_replay
        """Replay of recorded expert choices; None if they are not replayed."""
        self._suppress = torch.tensor(suppress, dtype=torch.long, device=self.device)
        """Token ids that engines never sample."""
        self._flops = Flops.of(model)
        self._apart = self._head_stands_apart()
        self._lines_up = model.config._attn_implementation == FLASH and self._keeps_lines_apart()
        self._shares = share_prefixes and self._sees_by_mask()
        self._enter: Callable[[Callable[[], Scores]], Scores] = _at_once

    def score(
        self, batch: learn.PackedBatch, outputs: Collection[Output] = (LOG_PROBS,), *, measure_entropy: bool = False
    ) -> dict[str, Tensor]:
        """Return `log_probs` and each of `outputs` by name, [tokens, ...]; 0 without gradient where `loss_mask` is 0.

        `measure_entropy`: also return `measured_entropy`, which has no gradient.
        """
        return self._enter(lambda: self._score(batch, self._layout(batch), outputs, measure_entropy))

    def through(self, enter: Callable[[Callable[[], Scores]], Scores]) -> None:
        """From now on compute scores inside `enter`, a function that makes sharded weights whole meanwhile."""
        self._enter = enter

    def attend(self) -> Tensor:
        """Return 0, computed from a dummy row, so that a rank without rows takes part in the collectives of all ranks.

        The forward pass and the backward pass of the result go through every block.
        """
        row = RowBatch((RowId(0, 0, 0, 0),), {
            "tokens": Ragged.of([np.zeros(2, np.int32)]), "loss_mask": Ragged.of([np.array([0, 1], np.uint8)]),
        })  # fmt: skip
        scored = self.score(learn.PackedBatch(row, device=str(self.device)))
        return torch.stack([values.sum() for values in scored.values()]).sum() * 0.0

    def _score(
        self, batch: learn.PackedBatch, layout: Layout, outputs: Collection[Output], measure_entropy: bool = False
    ) -> dict[str, Tensor]:
        trained = batch.loss_mask.nonzero().squeeze(1)
        if self.routing_replay is not None:
            self.routing_replay.plan(batch, layout)
        with self._precision():
            shown = self._row_media.inputs(batch, layout.ids) if self._row_media.shows(batch) else {}
            features = self._features(layout, shown).index_select(0, layout.before[trained])
            asked = wanted(outputs, batch, trained, self._vocab_size)
            scored = learn.score_distribution(
                features, self._head, batch.tokens[trained], replace(asked, measured_entropy=measure_entropy),
                vocab_size=self._vocab_size, temperature=self._temperature, max_logits=self._max_logits,
            )  # fmt: skip
        self._count(layout, len(trained))
        return {
            name: values.new_zeros(len(batch.tokens), *values.shape[1:]).index_put((trained,), values)
            for name, values in scored.items()
        }

    def _count(self, layout: Layout, scored: int) -> None:
        if self.counter is not None:
            every = int(layout.spans.sum())
            self.counter.add(layout, scored if self._apart else every, torch.is_grad_enabled())

    def _layout(self, batch: learn.PackedBatch) -> Layout:
        """Return the cheaper layout. A prefix tree saves tokens, but attention computes every token pair of a group."""
        if self._lines_up and not self._row_media.shows(batch):
            return one_line(batch)
        plain = by_row(batch)
        if self._row_media.shows(batch):
            return plain  # a shared prefix would need one copy of its media, but each row brings its own
        alone = len({row.group for row in batch.rows.ids}) == batch.num_rows
        if alone or not self._shares or self._flops.mostly_attention(plain.width):
            return plain
        tree = PrefixTree(batch, None if self.routing_replay is None else prefix_keys(batch))
        return tree.layout() if self._flops.favour_tree(plain, tree) else plain

    def _features(self, layout: Layout, shown: Mapping[str, Tensor] = _NOTHING) -> Tensor:
        """Return the head's inputs, [lines * width, features]; logits if body and head can't run separately.

        `shown`: inputs of the model for the rows' media.
        """
        inputs = {"input_ids": layout.ids, "use_cache": False, **shown}
        if layout.positions is not None:
            inputs["position_ids"] = layout.positions
        if layout.mask is not None:
            inputs["attention_mask"] = layout.mask
        if self._apart:
            features: Tensor = self.model.base_model(**inputs).last_hidden_state
        else:
            features = self.model(**inputs).logits
        return features.reshape(layout.ids.numel(), -1)

    def _head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(features) if self._apart else features
        return logits.index_fill(-1, self._suppress, _NEVER) if len(self._suppress) else logits

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None)

    # -- capabilities of the model, found by trying ---------------------------------------------------------------

    @torch.no_grad()
    def _head_stands_apart(self) -> bool:
        """Return True if body and head, run separately, give the model's logits.

        The logits differ if the model scales or caps logits after the head. Raises ConfigError for a model in which a
        token sees later tokens, and padding with them, such as BERT.
        """
        ids = torch.arange(4, device=self.device).remainder(self._vocab_size)[None]
        whole, cut = (self.model(input_ids=ids[:, :width], use_cache=False).logits for width in (4, 2))
        if (whole[:, :2] - cut).abs().max() > _LEAK * whole.abs().max():
            got = f"{self.model.config._name_or_path} of type {self.model.config.model_type!r}, whose tokens see later ones"
            raise ConfigError(
                FIELD, got, "a policy predicts each token from those before it: name a causal language model"
            )
        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            return False
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        apart = self.model.get_output_embeddings()(hidden)
        return apart.shape == whole.shape and torch.allclose(apart, whole, atol=_PROBE_TOLERANCE)

    @torch.no_grad()
    def _sees_by_mask(self) -> bool:
        """Return True if an attention mask alone decides which tokens a token sees, as prefix trees need.

        Every layer must have full attention, and a trial of two layouts of the same rows must give the same scores.
        """
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        windowed = getattr(config, "sliding_window", None) and kinds is None
        if windowed or any(kind != "full_attention" for kind in kinds or ()) or config._attn_implementation != "sdpa":
            return False
        plain, shared = self._trial(lambda batch: PrefixTree(batch).layout())
        return torch.allclose(plain, shared, atol=0.1 if self._autocast else _PROBE_TOLERANCE)

    @torch.no_grad()
    def _keeps_lines_apart(self) -> bool:
        """Return True if a token sees only its own row when the rows follow one another in one line.

        Layers with states or convolutions carry a row into the next one. For all other models, a trial of both layouts
        decides.
        """
        kinds = set(getattr(self.model.config.get_text_config(), "layer_types", None) or ())
        if not kinds <= {"full_attention", "sliding_attention"}:
            return False
        plain, lined_up = self._trial(one_line)
        return bool((plain - lined_up).abs().mean() < _MEAN_TOLERANCE)

    def _trial(self, layout: Callable[[learn.PackedBatch], Layout]) -> tuple[Tensor, Tensor]:
        """Return the log-probs of a few rows, each in a line of its own, and those in this layout."""
        batch = learn.PackedBatch(_family(self._vocab_size), device=str(self.device))
        return self._probe(batch, by_row(batch)), self._probe(batch, layout(batch))

    def _probe(self, batch: learn.PackedBatch, layout: Layout) -> Tensor:
        """Return the log-probs of a layout, to compare two layouts of the same rows."""
        return self._score(batch, layout, ())["log_probs"]


def _at_once(work: Callable[[], Scores]) -> Scores:
    return work()


def _family(vocab_size: int) -> RowBatch:
    """Return two groups of rows with common prefixes."""
    tokens = [(1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 7), (4, 3, 2), (4, 3, 1, 2)]
    arrays = [np.array(row, np.int32) % vocab_size for row in tokens]
    masks = [np.array([0] + [1] * (len(row) - 1), np.uint8) for row in tokens]
    ids = tuple(RowId(int(index > 2), index, 0, 0) for index in range(len(tokens)))
    return RowBatch(ids, {"tokens": Ragged.of(arrays), "loss_mask": Ragged.of(masks)})
