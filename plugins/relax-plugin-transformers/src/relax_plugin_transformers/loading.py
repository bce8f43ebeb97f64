# SPDX-License-Identifier: Apache-2.0
"""Loads a model folder as a module that can decode; every way a folder can be broken is a ConfigError.

`transformers` fills missing tensors with random numbers and only warns: here that is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.api.errors import ConfigError
from relax_plugin_transformers.options import TransformersOptions

if TYPE_CHECKING:
    import torch

_TOWERS = ("vision_config", "audio_config")
"""Parts of `config.json` by which a model that sees or hears is known."""
_LAYERS = {"full_attention", "sliding_attention"}
_WITH_STATES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose layers of linear attention keep their states in this engine's cache."""


def read_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config.json` as plain data, checked for what this engine can't run; imports nothing heavy."""
    path = str(model.get("path", ""))
    file = Path(path) / "config.json"
    if not path or not Path(path).is_dir():
        raise ConfigError("model.path", repr(path), "name a Hugging Face model folder")
    if not file.is_file():
        raise ConfigError("model.path", repr(path), "the folder has no config.json; name a Hugging Face model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError("model.path", f"{file} ({error})", "its config.json can't be read; copy it again") from error
    if not isinstance(config, dict):
        raise ConfigError("model.path", f"{file} holding a {type(config).__name__}", "config.json must be an object")
    if config.get("thinker_config"):
        fix = "save `.thinker` of what transformers loads from it as a folder of its own, with tokenizer and processor"
        raise ConfigError("model.path", f"{path} with a talker beside the thinker", fix)
    text = config.get("text_config", config)
    known = _LAYERS | {"linear_attention"} if text.get("model_type") in _WITH_STATES else _LAYERS
    unknown = sorted(set(text.get("layer_types") or ()) - known)
    if unknown:
        fix = "this engine decodes full and sliding attention, and linear attention of Qwen3.5; choose another engine"
        raise ConfigError("model.path", f"{path} with layers {', '.join(unknown)}", fix)
    return config


def load_model(model: Mapping[str, Any], options: TransformersOptions) -> torch.nn.Module:
    """The module on its device, in eval mode, with every tensor from the folder."""
    import torch
    import transformers

    config = read_config(model)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    device = _device(options.device)
    path = str(model["path"])
    transformers.utils.logging.disable_progress_bar()
    try:
        towers = any(config.get(name) for name in _TOWERS)
        kind = transformers.AutoModelForMultimodalLM if towers else transformers.AutoModelForCausalLM
        module, loaded = kind.from_pretrained(
            path,
            dtype=model.get("dtype") or "auto",
            attn_implementation=options.attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors raise a dozen types for a broken folder
        raise ConfigError(
            "model.path", f"{path} ({type(error).__name__}: {error})", "give a folder that loads"
        ) from error
    lacking = sorted(loaded["missing_keys"]) + sorted(map(str, loaded["mismatched_keys"]))
    if lacking:
        raise ConfigError("model.path", f"{path} without {', '.join(lacking[:4])}", "its weights are incomplete")
    return module.to(device).eval()


def _device(wanted: str) -> str:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device", wanted, "torch sees no GPU here; use cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def context_limit(module: torch.nn.Module, asked: int) -> int:
    """Prompt and completion together: what was asked, within what the model can."""
    limit = int(getattr(module.config.get_text_config(), "max_position_embeddings", 0) or 0)
    if limit and asked > limit:
        raise ConfigError("rollout.max_context", asked, f"the model's own context is {limit}; stay within it")
    return asked or limit or 1 << 30
