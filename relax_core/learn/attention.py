# SPDX-License-Identifier: Apache-2.0
"""The attention implementation of a Hugging Face model, or another if its architecture lacks it; and its longest row.

Engines and trainers share this code, so that both choose alike and their log-probs agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from relax_core.api.errors import ConfigError
from relax_core.api.family import even_context

T = TypeVar("T")
FALL_BACKS = ("sdpa", "eager")
"""Implementations that are tried in this order if the configuration leaves the choice to Relax."""


def load_attending(load: Callable[[str], T], config: Mapping[str, Any], attention: str, key: str, *, auto: bool) -> T:
    """Return `load(attention)`, or with `auto` the model with the first implementation that its architecture has.

    `config`: the content of `config.json`. Raises ConfigError naming `key` and the keys to set if the architecture
    lacks the implementation; other errors of `load` pass.
    """
    left = [attention, *(name for name in FALL_BACKS if name != attention)] if auto else [attention]
    for name in left:
        try:
            if name == "sdpa" and (config.get("text_config") or config).get("alibi"):
                raise ValueError("attention biases (alibi) do not support the masks of sdpa")
            return load(name)
        except (ValueError, ImportError) as error:
            if "support" not in str(error) or "attention" not in str(error).lower():
                raise
            refused = error
    fix = "the model's architecture lacks it; set trainer.attention and engine.attention to eager"
    raise ConfigError(key, repr(attention), fix) from refused


def longest_row(config: Any) -> int:
    """Return the number of tokens of the longest row that a model reads; 0 if its configuration does not say.

    `config`: the configuration of a loaded model.
    """
    stated = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    return min(stated, even_context(config.to_dict()) or stated)


def check_attends(path: str, model: Any) -> None:
    """Raise ConfigError for a loaded model without attention, such as Mamba."""
    kind = type(model)
    attends = any(getattr(kind, name, False) for name in ("_supports_sdpa", "_supports_flash_attn"))
    has_heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if not has_heads or (getattr(kind, "_is_stateful", False) and not attends):
        got = f"{path} of type {model.config.model_type!r}, whose layers have no attention"
        raise ConfigError("model.path", got, "Relax trains and samples models with attention; name such a model")
