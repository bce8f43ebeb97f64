# SPDX-License-Identifier: Apache-2.0
"""A model with a scalar head: a critic's `values` [tokens], or a reward model's `rewards` [rows].

The model is transformers' sequence classifier with one label; an export loads as one too. Training starts from the
folder's scalar head if it has one (a reward model), else from a head of zeros. `Policy` lays out rows and computes the
body. The head always computes in float32.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from relax_core import learn
from relax_core.api import ConfigError, Output
from relax_core.learn.attention import load_attending
from relax_core.trainer_kit.model_folder import FIELD, check_folder, first_line
from relax_core.trainer_kit.setup import SCALAR_HEAD
from relax_plugin_torch.layout import Layout, whole_rows
from relax_plugin_torch.model import ATTENTION, check_complete
from relax_plugin_torch.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_scalar_model(path: str, attention: str, device: torch.device, *, auto: bool = False) -> PreTrainedModel:
    """Load the folder of a causal language model, or of a sequence classifier with one label, with a scalar head.

    `auto`: as in `load_model`. Raises ConfigError naming the fault of the folder.
    """
    folder = check_folder(path)
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()

    def load(attention: str) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True, use_safetensors=True,
            num_labels=1, output_loading_info=True, ignore_mismatched_sizes=True,  # check_complete refuses them
        )  # fmt: skip

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, report = load_attending(load, config, attention, ATTENTION, auto=auto)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises errors of many types for a faulty folder
        raise ConfigError(
            FIELD, path, f"transformers can't load it with a scalar head ({first_line(error)}); choose another model"
        ) from error
    if SCALAR_HEAD not in model.state_dict():
        raise ConfigError(
            FIELD, path, f"{type(model).__name__} has no {SCALAR_HEAD}; choose a model whose family has one"
        )
    fresh = SCALAR_HEAD in report["missing_keys"]
    check_complete(path, {**report, "missing_keys": set(report["missing_keys"]) - {SCALAR_HEAD}})
    if fresh:
        torch.nn.init.zeros_(model.score.weight)
    return model.to(device).eval()  # type: ignore[no-any-return]


class ScalarPolicy(Policy):
    """A policy whose head gives a number per token or row, instead of log-probs of tokens."""

    def __init__(
        self, model: PreTrainedModel, outputs: frozenset[str], *, autocast: torch.dtype | None, share_prefixes: bool
    ) -> None:
        self._outputs = outputs
        super().__init__(model, temperature=1.0, autocast=autocast, max_logits=1, share_prefixes=share_prefixes)

    def _score(
        self, batch: learn.PackedBatch, layout: Layout, outputs: Collection[Output], measure_entropy: bool = False
    ) -> dict[str, Tensor]:
        """Return `values` before each trained token, 0 elsewhere, [tokens], and `rewards` at last tokens, [rows]."""
        scored = {}
        if "values" in self._outputs:
            trained = batch.loss_mask.nonzero().squeeze(1)
            values = self._scalar(layout, layout.before[trained])
            scored["values"] = values.new_zeros(len(batch.tokens)).index_put((trained,), values)
        if "rewards" in self._outputs:
            whole = whole_rows(batch)
            scored["rewards"] = self._scalar(whole, whole.before[batch.lengths.cumsum(0) - 1] + 1)
        return scored

    def _scalar(self, layout: Layout, places: Tensor) -> Tensor:
        with self._precision():
            features = self._features(layout).index_select(0, places)
        self._count(layout, len(places))
        with torch.autocast(self.device.type, enabled=False):
            return linear(features.float(), self.model.score.weight.float()).squeeze(-1)

    def _layout(self, batch: learn.PackedBatch) -> Layout:
        return super()._layout(batch) if "values" in self._outputs else whole_rows(batch)

    def _probe(self, batch: learn.PackedBatch, layout: Layout) -> Tensor:
        """Return features instead of scores, since a head of zeros gives the same score for any layout."""
        with self._precision():
            return self._features(layout).index_select(0, layout.before[batch.loss_mask.nonzero().squeeze(1)])

    def _head_stands_apart(self) -> bool:
        return True
