# SPDX-License-Identifier: Apache-2.0
"""Folding of adapters into a model: `relax convert fold-lora` writes one Hugging Face folder from two.

No run, trainer or GPU is needed. The adapters and one tensor of the model are in memory at a time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.api.errors import ConfigError, disk_error
from relax_core.engine_kit.model_weights import ADAPTER_NAME, FLOATS, StagedAdapter, as_array, as_tensor
from relax_core.runs import check_new_folder
from relax_core.tensor_files import safetensors_file
from relax_core.tensor_files.whole_folder import new_folder

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WITHOUT = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices",
    "target_parameters", "lora_bias", "fan_in_fan_out", "use_qalora", "alora_invocation_tokens",
)  # fmt: skip
"""Settings of peft with which a model is more than base + scale * B A."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initial values of peft that also change the base."""
LEFT_OUT = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "adapter", ".*")
"""Files of the base that are not copied: weights in all formats, and adapters."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A written model."""

    directory: Path
    changed: int
    """Number of weights into which an adapter was folded."""
    tensors: int
    """Number of all tensors of the model."""


def fold_lora(base: Path, adapter: Path, out: Path) -> Folded:
    """Write the model of the folder `base` with the adapters of the folder `adapter`, in peft's format, folded in.

    Every weight keeps its number format and is rounded once. `out` must be new or empty, and gets the other files of
    the base too. Raises ConfigError for adapters that do not fit the base or are more than pairs of matrices, and
    InfrastructureError if the folder can't be written.
    """
    out = out.absolute()
    check_new_folder(out)
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise ConfigError("BASE", base, "name a folder of a whole model with .safetensors files")
    rank, scale = _settings(adapter)
    try:
        opened = {file.name: safetensors_file.read(file) for file in files}
        pairs = _pairs(adapter, safetensors_file.read(adapter / WEIGHTS))
    except (OSError, ValueError) as error:
        raise ConfigError("weights", base, f"a file can't be read ({error}); copy the folder again") from error
    shapes = {
        name: (file.dtypes[name], array.shape) for file in opened.values() for name, array in file.tensors.items()
    }
    _check(adapter, pairs, rank, shapes, base)
    staged = StagedAdapter(pairs, scale, [])
    try:
        with new_folder(out) as path:
            shutil.copytree(base, path, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
            for name, file in opened.items():
                with (path / name).open("w+b") as written:
                    safetensors_file.write(written, _folded(file, staged), file.metadata, 0)
    except OSError as error:
        raise disk_error(out, error) from error
    return Folded(out, len(pairs), len(shapes))


def _folded(file: safetensors_file.TensorFile, staged: StagedAdapter) -> Iterator[tuple[str, np.ndarray, str]]:
    for name, array in file.tensors.items():
        dtype = file.dtypes[name]
        if name in staged.pairs:
            array = as_array(staged.merged(name, as_tensor(array, dtype)), dtype)
        yield name, array, dtype


def _settings(adapter: Path) -> tuple[int, float]:
    """Return the rank of the adapters and the factor of their products.

    Raises ConfigError for settings with which a layer is not base + scale * B A.
    """
    try:
        config: dict[str, Any] = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "name a folder that peft saved, such as export/adapter of a run"
        raise ConfigError("ADAPTER", adapter, f"{CONFIG} has no rank and alpha ({error!r}); {fix}") from error
    wrong = [name for name in WITHOUT if config.get(name)]
    wrong += ["peft_type"] if config.get("peft_type") != "LORA" else []
    wrong += ["bias"] if config.get("bias", "none") != "none" else []
    wrong += ["init_lora_weights"] if str(config.get("init_lora_weights")).startswith(CHANGES_BASE) else []
    if wrong:
        fix = "only pairs of matrices A and B are folded here; merge these adapters with peft"
        raise ConfigError(f"ADAPTER {wrong[0]}", config.get(wrong[0]), fix)
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pairs(adapter: Path, file: safetensors_file.TensorFile) -> dict[str, dict[str, Tensor]]:
    """Return matrices A and B in float32 by the name of the weight that they change."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, array in file.tensors.items():
        found = ADAPTER_NAME.fullmatch(name)
        if found is None or file.dtypes[name] not in FLOATS:
            raise ConfigError("ADAPTER", f"{adapter} with {name}", "it is not a matrix A or B; merge it with peft")
        pairs.setdefault(f"{found['module']}.weight", {})[found["side"]] = as_tensor(array, file.dtypes[name]).float()
    return pairs


def _check(
    adapter: Path, pairs: Mapping[str, Mapping[str, Any]], rank: int,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], base: Path,
) -> None:  # fmt: skip
    """Raise ConfigError unless every pair is complete, has this rank and the shape of a weight of the base."""
    if not pairs:
        raise ConfigError("ADAPTER", adapter, f"{WEIGHTS} is empty; name a folder that peft saved")
    for weight, pair in pairs.items():
        dtype, shape = shapes.get(weight, ("", ()))
        have = {side: tuple(matrix.shape) for side, matrix in sorted(pair.items())}
        if dtype not in FLOATS or len(shape) != 2 or have != {"A": (rank, shape[1]), "B": (shape[0], rank)}:
            got = ", ".join(f"{side} {own}" for side, own in have.items()) + f" of rank {rank}"
            want = f"{dtype} {shape}" if dtype else "no such weight"
            raise ConfigError("ADAPTER", f"{weight} with {got}", f"{base} has {want}; name the model that was trained")
