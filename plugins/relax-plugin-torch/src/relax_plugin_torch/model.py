# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder in and out of memory: load it whole or not at all, name its tensors as the folder does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relax_core.api import ConfigError, TensorInfo
from relax_core.api.weights import combined_fingerprint, tensor_fingerprint
from relax_core.learn.huggingface import parts_of
from relax_plugin_torch.folder import FIELD, TOKENIZER_FILES, check_folder, has_towers
from relax_plugin_torch.sharding import gathered, local

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from relax_plugin_torch.adapters import Adapters


SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def load_model(path: str, attention: str, device: torch.device) -> PreTrainedModel:
    """In float32 and without dropout: the log-probs that are trained are those that were sampled."""
    folder = check_folder(path)
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = loader(folder).from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True, use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True,  # refused below, by name
        )  # fmt: skip
    except Exception as error:  # whatever a foreign loader raises is about this folder
        raise ConfigError(FIELD, path, f"transformers can't load it ({first_line(error)}); check the folder") from error
    check_complete(path, report)
    return model.to(device).eval()  # type: ignore[no-any-return]


def loader(folder: Path) -> Any:
    """The class that loads it: models that see or hear have one of their own."""
    import transformers

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return transformers.AutoModelForMultimodalLM if has_towers(config) else transformers.AutoModelForCausalLM


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_complete(path: str, report: Mapping[str, Any]) -> None:
    """transformers fills what a file lacks with random numbers and only warns."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            FIELD, path, f"its weights lack {', '.join(missing[:4])} ({len(missing)} in all); save the model again"
        )
    if report["mismatched_keys"]:
        name, saved, wanted = sorted(report["mismatched_keys"])[0]
        shapes = f"{tuple(saved)} in its weights but {tuple(wanted)} by its config.json"
        raise ConfigError(FIELD, path, f"{name} is {shapes}; save the model again")


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights under the model's own names; tied ones once."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def named_tensors(model: PreTrainedModel, adapters: Adapters | None = None) -> dict[str, Tensor]:
    """Weights under the names of a Hugging Face folder, without adapters, to be written to: views of the model's own."""
    from transformers.core_model_loading import revert_weight_conversion

    own = own_tensors(model) if adapters is None else adapters.below(own_tensors(model))
    parts = parts_of(own, lambda tensors: revert_weight_conversion(model, tensors))
    fused = {part.source for part in parts.values()}
    if shared := sorted(name for name in fused if local(own[name]) is not own[name]):
        fix = "what is fused can't be loaded into shares of it: choose none for this role"
        raise ConfigError("trainer.sharding", f"fsdp with {shared[0]}", fix)
    kept = {name: tensor for name, tensor in own.items() if name not in fused}
    return {**kept, **{name: part.of(own) for name, part in parts.items()}}


def whole_tensors(model: PreTrainedModel, keep: bool = True, adapters: Adapters | None = None) -> dict[str, Tensor]:
    """As `named_tensors`, with adapters folded in, gathered from all ranks, which all call; empty for those who only help."""
    from transformers.core_model_loading import revert_weight_conversion

    own = gathered(own_tensors(model), keep)
    if not keep:
        return {}
    return dict(revert_weight_conversion(model, own if adapters is None else adapters.folded(own)))


def fingerprint(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Return the fingerprint of what would be published of these tensors."""
    return combined_fingerprint(
        TensorInfo(name, array.shape, kind, tensor_fingerprint(array), array.nbytes)
        for name, array, kind in published_arrays(tensors, dtype)
    )


def published_arrays(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, np.ndarray, str]]:
    """(name, array, dtype) as transports take them; bf16 as its bits."""
    for name, tensor in tensors.items():
        yield name, *published_array(tensor, dtype)


def published_array(tensor: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, str]:
    """Floats in this dtype."""
    value = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).cpu().contiguous()
    bits = value.view(torch.uint16) if value.dtype == torch.bfloat16 else value
    return bits.numpy(), SAFETENSORS[value.dtype]


def export_folder(
    model: PreTrainedModel, state: Mapping[str, Tensor], source: str, directory: Path, dtype: torch.dtype
) -> None:
    """A folder that AutoModelForCausalLM and AutoTokenizer load; `state` is the model's own, whole."""
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    before = model.config.dtype
    model.config.dtype = dtype
    try:
        model.save_pretrained(directory, state_dict=state)
    finally:
        model.config.dtype = before
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, directory / name)
