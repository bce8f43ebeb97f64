# SPDX-License-Identifier: Apache-2.0
"""Loading of model folders for decoding. A faulty folder raises ConfigError.

For missing tensors, transformers only warns and fills in random numbers; this module refuses such folders.
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
"""Keys of `config.json` that only models with vision or audio inputs have."""
_LAYERS = {"full_attention", "sliding_attention"}
_WITH_STATES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose linear attention this engine supports; their states are kept in its cache."""


def read_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `config.json` as plain data, without importing torch.

    Raises ConfigError if the folder is broken or this engine can't run the model.
    """
    path = str(model.get("path", ""))
    file = Path(path) / "config.json"
    if not path or not Path(path).is_dir():
        raise ConfigError("model.path", repr(path), "name a Hugging Face model folder")
    if not file.is_file():
        raise ConfigError("model.path", repr(path), "the folder has no config.json; name a Hugging Face model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError("model.path", f"{file} ({error})", "the file can't be read; copy it again") from error
    if not isinstance(config, dict):
        raise ConfigError("model.path", f"{file} with a {type(config).__name__}", "config.json must be a JSON object")
    if config.get("thinker_config"):
        fix = "save `.thinker` of the loaded transformers model, with tokenizer and processor, as a folder of its own"
        raise ConfigError("model.path", f"{path} with a talker in addition to the thinker", fix)
    text = config.get("text_config", config)
    known = _LAYERS | {"linear_attention"} if text.get("model_type") in _WITH_STATES else _LAYERS
    unknown = sorted(set(text.get("layer_types") or ()) - known)
    if unknown:
        fix = "this engine runs full and sliding attention, and linear attention of Qwen3.5; choose another engine"
        raise ConfigError("model.path", f"{path} with layers {', '.join(unknown)}", fix)
    return config


def load_model(model: Mapping[str, Any], options: TransformersOptions) -> torch.nn.Module:
    """Return the module on its device, in eval mode. Raises ConfigError if a tensor is missing from the folder."""
    import torch
    import transformers

    from relax_core.learn.attention import check_attends, load_attending

    config = read_config(model)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    device = choose_device(options.device)
    path = str(model["path"])
    transformers.utils.logging.disable_progress_bar()
    towers = any(config.get(name) for name in _TOWERS)
    kind = transformers.AutoModelForMultimodalLM if towers else transformers.AutoModelForCausalLM

    def load(attention: str) -> Any:
        return kind.from_pretrained(
            path, dtype=model.get("dtype") or "auto", attn_implementation=attention, local_files_only=True,
            output_loading_info=True,
        )  # fmt: skip

    auto = options.attention == "auto"
    try:
        module, loaded = load_attending(
            load, config, "sdpa" if auto else options.attention, "engine.attention", auto=auto
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers and safetensors raise a dozen types for a broken folder
        raise ConfigError(
            "model.path", f"{path} ({type(error).__name__}: {error})", "name a folder that transformers can load"
        ) from error
    lacking = sorted(loaded["missing_keys"]) + sorted(map(str, loaded["mismatched_keys"]))
    if lacking:
        raise ConfigError("model.path", f"{path} without {', '.join(lacking[:4])}", "save or copy its weights again")
    check_attends(path, module)
    if (
        getattr(type(module), "_is_stateful", False)
        and config.get("text_config", config)["model_type"] not in _WITH_STATES
    ):
        fix = "this engine keeps the states of Qwen3.5 alone; choose another engine"
        raise ConfigError("model.path", f"{path} of type {config['model_type']!r}, whose layers keep states", fix)
    return module.to(device).eval()


def choose_device(wanted: str) -> str:
    """Return `cpu` or `cuda`. Raises ConfigError for `cuda` without a GPU."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device", wanted, "torch sees no GPU on this machine; use cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def context_limit(module: torch.nn.Module, asked: int) -> int:
    """Return the maximum number of tokens of prompt and completion: `asked`, or the model's limit if `asked` is 0.

    Raises ConfigError if `asked` exceeds the model's limit.
    """
    from relax_core.learn.attention import longest_row

    limit = longest_row(module.config)
    if limit and asked > limit:
        raise ConfigError("rollout.max_context", asked, f"the model's own context is {limit}; stay within it")
    return asked or limit or 1 << 30
