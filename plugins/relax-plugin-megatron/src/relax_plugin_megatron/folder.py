# SPDX-License-Identifier: Apache-2.0
"""The files of a Hugging Face folder: parts of tensors are read from it, and whole tensors are written to it in turn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from relax_core.api import ConfigError
from relax_core.trainer_kit.model_folder import FIELD
from relax_core.trainer_kit.tokenizer_files import TokenizerFiles

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
FILE_BYTES = 5 * 2**30
"""Largest size of a weight file, as transformers chooses it."""


class FolderReader:
    """The tensors of a Hugging Face folder, of which parts can be read."""

    def __init__(self, path: str) -> None:
        self._path, self._open = Path(path), ExitStack()
        self._files: dict[str, Any] = {}
        index = self._path / INDEX
        if index.is_file():
            self._file_of: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            self._file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> Iterable[str]:
        return self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ConfigError if the folder lacks it."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: Sequence[slice]) -> Tensor:
        """Read the part `index` of a tensor; nothing else is read from the file."""
        return self._slice(name)[tuple(index)]  # type: ignore[no-any-return]

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ConfigError(FIELD, self._path, f"the weights lack {name}; save the model again")
        return self._file(self._file_of[name]).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._open.enter_context(safe_open(self._path / name, "pt"))
        return self._files[name]


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    source: Path,
    files: TokenizerFiles,
    directory: Path,
) -> None:
    """Write a folder that transformers loads; only the tensors of one file are in memory at a time.

    `source`: folder of the model, whose generation_config.json is copied.
    """
    parts: list[list[str]] = []
    sizes = 0
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(held, directory / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        held[name] = tensor.contiguous()
        sizes += tensor.nbytes
    flush()
    names = [SINGLE] if len(parts) == 1 else [
        f"model-{part + 1:05d}-of-{len(parts):05d}.safetensors" for part in range(len(parts))
    ]  # fmt: skip
    for part, name in enumerate(names):
        (directory / f"part-{part}").rename(directory / name)
    if len(parts) > 1:
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        index = {"metadata": {"total_size": sizes}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", directory / "generation_config.json")
    files.write(directory)


def exported_config(config: Mapping[str, Any], dtype: str, scalar: bool) -> dict[str, Any]:
    """Return the config.json of an export: that of the model with the format of the weights, and with their head."""
    made = {name: value for name, value in config.items() if name not in ("torch_dtype", "dtype")} | {"dtype": dtype}
    if scalar:
        names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or ()]
        made |= {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return made
