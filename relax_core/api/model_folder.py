# SPDX-License-Identifier: Apache-2.0
"""Facts and faults of a Hugging Face model's folder, found without loading the model.

Only `config.json` and the headers of weight files are read, never the weights or the tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from relax_core.api.errors import ConfigError
from relax_core.api.family import Routing, even_context
from relax_core.api.task import MediaKind

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
NO_BOUND = 1 << 30
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def model_context(folder: Path) -> int | None:
    """Return the model's longest sequence in tokens; None if `config.json` has no such key or cannot be read.

    A model with `longrope` positions is used up to its `even_context` only.
    """
    config = _known(folder)
    parts = (config, _text_part(config))
    stated = next((int(part[key]) for part in parts for key in CONTEXT_KEYS if isinstance(part.get(key), int)), None)
    even = even_context(config)
    return even if stated is None else min(stated, even or stated)


def context_reason(folder: Path) -> str:
    """Return the key that makes the context of a model with `longrope` positions short, and why; else an empty text."""
    even = even_context(_known(folder))
    if even is None:
        return ""
    return f" (longrope in config.json: beyond original_max_position_embeddings = {even}, a row changes all rows of its batch)"


def bounded_context(folder: Path) -> int:
    """Return the model's longest sequence in tokens; `NO_BOUND` if it is unknown."""
    return model_context(folder) or NO_BOUND


def routing(folder: Path) -> Routing | None:
    """Return the model's expert routing; None if the model has no routers or `config.json` cannot be read."""
    return Routing.of(_known(folder))


def model_type(folder: Path) -> str:
    """Return `model_type` of `config.json`; empty if the key is missing or the file cannot be read."""
    return str(_known(folder).get("model_type") or "")


def vocabulary_size(folder: Path) -> int | None:
    """Return `vocab_size` of `config.json`; None if the key is missing or the file cannot be read."""
    config = _known(folder)
    size = config.get("vocab_size", _text_part(config).get("vocab_size"))
    return size if isinstance(size, int) else None


def placeholders(folder: Path) -> dict[str, int]:
    """Return kind of medium -> placeholder token id, for the kinds in `config.json`; empty if it cannot be read."""
    config = _known(folder)
    part = config.get("thinker_config")
    known = part if isinstance(part, dict) else config
    ids = {kind: known.get(f"{kind}_token_id") for kind in get_args(MediaKind)}
    return {kind: number for kind, number in ids.items() if isinstance(number, int)}


def folder_errors(folder: Path, key: str) -> Iterator[ConfigError]:
    """Yield an error for every missing or broken file in a model's folder: its configuration and its weights."""
    if not os.path.isdir(folder):  # not Path.is_dir, which raises an error for a name that is too long
        what = "a file" if os.path.exists(folder) else "a folder that does not exist"
        fix = "name the folder of a Hugging Face model"
        if not (os.path.exists(folder) or os.path.exists(folder.parent)):  # such as Qwen/Qwen3-0.6B, beside no file
            fix += f", or download it: hf download {folder.parent.name}/{folder.name} --local-dir {folder}"
        yield ConfigError(key, f"{folder}, {what}", fix)
        return
    try:
        _read(folder)
    except FileNotFoundError:
        yield ConfigError(key, f"{folder} without config.json", "name the folder of a Hugging Face model")
    except (OSError, ValueError, RecursionError) as error:
        yield ConfigError(key, f"{folder / 'config.json'}, which can't be read: {error}", "download the model again")
    if not any(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern)):
        yield ConfigError(
            key, f"{folder} without weights", f"it must contain {' or '.join(WEIGHTS)}: download the model again"
        )
    else:
        for file in sorted(folder.glob("*.safetensors")):
            if said := _damage(file):
                yield ConfigError(key, f"{file}, which {said}", "download the model again")


def _damage(file: Path) -> str:
    """Describe the damage of a weight file, judged by its header and length only; empty for an intact file."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length + 8 > size:
                return f"ends within its header: it has {size} bytes"
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = 8 + length + int(max(ends, default=0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        return f"can't be read: {error}"
    return f"is cut short: it has {size} of {whole} bytes" if size < whole else ""


def _read(folder: Path) -> dict[str, object]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("the file is not a JSON object")
    return config


def _known(folder: Path) -> dict[str, Any]:
    """Return the content of `config.json`; empty if it cannot be read."""
    try:
        return _read(folder)
    except (OSError, ValueError, RecursionError):
        return {}


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `text_config` part of a multimodal model's configuration; empty for a text-only model."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}
