# SPDX-License-Identifier: Apache-2.0
"""Images, videos and sound: transformers' encoders on the first stage, and positions of tokens on every stage.

Transformers' model of the family computes both; only its decoder is Megatron's. Every rank of the first stage holds the
whole encoders and computes the media of its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.modeling_outputs import MoeModelOutputWithPast

from relax_core import learn
from relax_core.trainer_kit.row_media import RowMedia
from relax_plugin_megatron.model import Decoder

Inputs = dict[str, Tensor]


class RankMedia:
    """The media of the rows of one rank."""

    def __init__(self, path: str, location: str, first: Decoder | None, dtype: torch.dtype, sequence: bool) -> None:
        """`location`: the run's media store, or empty. `first`: the chunk of layers that gets `encoders`, if it is here.

        `sequence`: the tensor-parallel ranks split the tokens.
        """
        with torch.device("meta"):
            model = AutoModelForMultimodalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
        self._base, self._sequence = model.base_model, sequence
        self.rows = RowMedia(model, location)
        if first is None:
            return
        self._stand_in = self._base.language_model = _StandIn(first.embedding.word_embeddings)
        first.encoders = nn.ModuleDict()
        for name, tower in self._base.named_children():
            if tower is not self._stand_in:
                first.encoders[name] = type(tower)._from_config(tower.config, dtype=dtype).eval()
                setattr(self._base, name, first.encoders[name])

    def inputs(self, batch: learn.PackedBatch | None, ids: Tensor) -> tuple[Inputs, Tensor]:
        """Return the model's inputs for the media of a micro-batch, and positions [3, rows, width] of its ids."""
        found = {} if batch is None else self.rows.inputs(batch, ids)
        positions = found.pop("position_ids", None)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        return found, positions

    def hidden(self, ids: Tensor, inputs: Inputs, held: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the first layer, [tokens, rows, width], and the features to add after the first layers.

        The features are [layers, tokens, rows, width], or None without images and videos. `held`: columns of this rank.
        """
        self._base(input_ids=ids, use_cache=False, **inputs)
        whole, *deep = self._stand_in.take()
        own = [self._own(part, held) for part in deep]
        return self._own(whole, held), torch.stack(own) if own else None

    def _own(self, part: Tensor, held: Tensor) -> Tensor:
        """Return this rank's tokens of [rows, width of ids, width]."""
        tokens = part[:, held].transpose(0, 1).contiguous()
        return scatter_to_sequence_parallel_region(tokens) if self._sequence else tokens


class _StandIn(nn.Module):
    """Stands in for the decoder in transformers' model, and keeps the inputs meant for the decoder."""

    def __init__(self, embed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._embed = [embed]  # kept in a list, so that `nn.Module` does not register the embedding
        self._kept: list[Tensor] = []

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        return self._embed[0]

    def forward(
        self, inputs_embeds: Tensor, visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: list[Tensor] | None = None, **_: Any,
    ) -> MoeModelOutputWithPast:  # fmt: skip
        self._kept = [inputs_embeds]
        for features in deepstack_visual_embeds or () if visual_pos_masks is not None else ():
            added = torch.zeros_like(inputs_embeds)
            self._kept.append(added.masked_scatter(visual_pos_masks[..., None], features.to(added)))
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)

    def take(self) -> list[Tensor]:
        """Return the embeddings of the last call, [rows, width of ids, width], and the additions of each layer."""
        kept, self._kept = self._kept, []
        return kept
