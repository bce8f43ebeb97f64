# SPDX-License-Identifier: Apache-2.0
"""The folder of a model as trainers check it, the rows that it can read, and its tensors as weight transports send them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core.api import ConfigError, RowBatch, TensorInfo
from relax_core.api.weights import combined_fingerprint, tensor_fingerprint

SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

FIELD = "model.path"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check_folder(path: str) -> Path:
    """Return the folder of a model; raise ConfigError naming the file or setting that the folder lacks."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(FIELD, path, "the folder does not exist; name a local Hugging Face model folder")
    config = read_json(folder, "config.json")
    if "model_type" not in config:
        raise ConfigError(FIELD, path, "the config.json has no model_type; name a Hugging Face model folder")
    if config.get("thinker_config"):
        fix = "save `.thinker` of the loaded transformers model, with tokenizer and processor, as a folder of its own"
        raise ConfigError(FIELD, f"{path} with a talker in addition to the thinker", fix)
    missing = [name for name in _weight_files(folder) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(FIELD, path, f"the folder lacks {', '.join(missing)}; save the model as safetensors")
    return folder


def has_towers(config: Mapping[str, Any]) -> bool:
    """Return True if this `config.json` describes a model with vision or audio inputs."""
    return any(config.get(name) for name in ("vision_config", "audio_config"))


def _weight_files(folder: Path) -> list[str]:
    if not (folder / _INDEX).is_file():
        return [_WEIGHTS]
    shards = read_json(folder, _INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise ConfigError(FIELD, folder, f"the file {_INDEX} has no weight_map; save the model again")
    return sorted(set(shards.values()))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(FIELD, folder, f"the folder has no {name}; name a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(FIELD, folder, f"{name} is not readable JSON ({error}); save the model again") from error
    if not isinstance(value, dict):
        raise ConfigError(FIELD, folder, f"{name} is not a JSON object; save the model again")
    return value


def check_rows(rows: RowBatch, vocab_size: int, max_context: int) -> None:
    """Raise ValueError for an empty row, a row longer than the model's context, or a token outside its vocabulary."""
    column = rows.columns["tokens"]
    if not len(column):
        return
    length = np.asarray(column.lengths)
    for row in (int(length.argmin()), int(length.argmax())):
        if not 0 < length[row] <= (max_context or length[row]):
            raise ValueError(
                f"row {tuple(rows.ids[row])}: got {length[row]} tokens; the model reads 1 to {max_context}"
            )
    wrong = (column.values < 0) | (column.values >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        row = int(np.searchsorted(column.offsets(), at, side="right")) - 1
        raise ValueError(
            f"row {tuple(rows.ids[row])}: got token {int(column.values[at])}; the model has 0 to {vocab_size - 1}"
        )


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def fingerprint(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Return the fingerprint that these tensors would have when published in `dtype`."""
    return combined_fingerprint(
        TensorInfo(name, array.shape, kind, tensor_fingerprint(array), array.nbytes)
        for name, array, kind in published_arrays(tensors, dtype)
    )


def published_arrays(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield (name, array, dtype name) of each tensor, as weight transports expect."""
    for name, tensor in tensors.items():
        yield name, *published_array(tensor, dtype)


def published_array(tensor: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, str]:
    """Return an array and its dtype name. Floating-point values are cast to `dtype`; bfloat16 becomes uint16 bits."""
    value = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).cpu().contiguous()
    bits = value.view(torch.uint16) if value.dtype == torch.bfloat16 else value
    return bits.numpy(), SAFETENSORS[value.dtype]
