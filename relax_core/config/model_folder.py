# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model's folder, read without loading the model: facts of its `config.json`, and what is missing or damaged.

Only `config.json` and the headers of weights are read; weights and tokenizer are for those who load them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from relax_core.api.errors import ConfigError
from relax_core.api.family import Routing
from relax_core.api.task import MediaKind

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
NO_BOUND = 1 << 30
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def model_context(folder: Path) -> int | None:
    """Longest sequence of the model; None where its `config.json` does not say or can't be read."""
    config = _known(folder)
    parts = (config, _text_part(config))
    return next((int(part[key]) for part in parts for key in CONTEXT_KEYS if isinstance(part.get(key), int)), None)


def bounded_context(folder: Path) -> int:
    """Longest sequence of the model; one that does not say has no bound of its own."""
    return model_context(folder) or NO_BOUND


def routing(folder: Path) -> Routing | None:
    """Read the model's routing; None where it has no routers, or its `config.json` can't be read."""
    return Routing.of(_known(folder))


def model_type(folder: Path) -> str:
    """As `config.json` names it; empty where it does not, or can't be read."""
    return str(_known(folder).get("model_type") or "")


def vocabulary_size(folder: Path) -> int | None:
    """Ids of the model, by its `config.json`; None where that does not say or can't be read."""
    config = _known(folder)
    size = config.get("vocab_size", _text_part(config).get("vocab_size"))
    return size if isinstance(size, int) else None


def placeholders(folder: Path) -> dict[str, int]:
    """By kind of medium, the id of the tokens that hold its place; empty where `config.json` names none or can't be read."""
    config = _known(folder)
    part = config.get("thinker_config")
    known = part if isinstance(part, dict) else config
    ids = {kind: known.get(f"{kind}_token_id") for kind in get_args(MediaKind)}
    return {kind: number for kind, number in ids.items() if isinstance(number, int)}


def folder_errors(folder: Path, key: str) -> Iterator[ConfigError]:
    """Yield an error for all that is missing or broken in a model's folder, judged by its configuration and weights."""
    if not os.path.isdir(folder):  # a name that is too long is no folder, and no error either
        what = "a file" if os.path.exists(folder) else "a folder that does not exist"
        yield ConfigError(key, f"{folder}, {what}", "name the folder of a Hugging Face model")
        return
    try:
        _read(folder)
    except FileNotFoundError:
        yield ConfigError(key, f"{folder} without config.json", "name the folder of a Hugging Face model")
    except (OSError, ValueError, RecursionError) as error:
        yield ConfigError(key, f"{folder / 'config.json'}, which can't be read: {error}", "download the model again")
    if not any(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern)):
        yield ConfigError(
            key, f"{folder} without weights", f"it needs {' or '.join(WEIGHTS)}: download the model again"
        )
    else:
        for file in sorted(folder.glob("*.safetensors")):
            if said := _damage(file):
                yield ConfigError(key, f"{file}, which {said}", "download the model again")


def _damage(file: Path) -> str:
    """Return what is wrong with a file of weights, judged by its header and length alone; empty where nothing is."""
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


def _read(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("it is not a JSON object")
    return config


def _known(folder: Path) -> dict[str, Any]:
    """The content of `config.json`, nothing where it can't be read."""
    try:
        return _read(folder)
    except (OSError, ValueError, RecursionError):
        return {}


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part about text in the configuration of a model that sees or hears; empty where there is none."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}
