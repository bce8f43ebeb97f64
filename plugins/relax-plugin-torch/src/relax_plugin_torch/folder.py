# SPDX-License-Identifier: Apache-2.0
"""Checks of the contents of a Hugging Face model folder, made before anything heavy is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.api import ConfigError

FIELD = "model.path"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check_folder(path: str) -> Path:
    """The folder, or ConfigError naming what is missing in it."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(FIELD, path, "there is no such folder; name a local Hugging Face model folder")
    config = _json(folder, "config.json")
    if "model_type" not in config:
        raise ConfigError(FIELD, path, "its config.json has no model_type; name a Hugging Face model folder")
    if config.get("thinker_config"):
        fix = "save `.thinker` of what transformers loads from it as a folder of its own, with tokenizer and processor"
        raise ConfigError(FIELD, f"{path} with a talker beside the thinker", fix)
    missing = [name for name in _weight_files(folder) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(FIELD, path, f"it lacks {', '.join(missing)}; save the model with safetensors weights")
    return folder


def has_towers(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a model that sees or hears."""
    return any(config.get(name) for name in ("vision_config", "audio_config"))


def _weight_files(folder: Path) -> list[str]:
    if not (folder / _INDEX).is_file():
        return [_WEIGHTS]
    shards = _json(folder, _INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise ConfigError(FIELD, folder, f"its {_INDEX} has no weight_map; save the model again")
    return sorted(set(shards.values()))


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(FIELD, folder, f"it has no {name}; name a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(FIELD, folder, f"its {name} is not readable JSON ({error}); save the model again") from error
    if not isinstance(value, dict):
        raise ConfigError(FIELD, folder, f"its {name} holds no JSON object; save the model again")
    return value
