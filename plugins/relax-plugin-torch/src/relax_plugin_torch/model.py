# SPDX-License-Identifier: Apache-2.0
"""Loading and exporting of Hugging Face model folders, and access to a model's tensors under the folder's names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relax_core.api import ConfigError, RowBatch, TensorInfo
from relax_core.api.weights import combined_fingerprint, tensor_fingerprint
from relax_core.learn.attention import check_attends, load_attending
from relax_core.learn.huggingface import parts_of
from relax_plugin_torch.adapters import Adapters
from relax_plugin_torch.sharding import gathered, local
from relax_plugin_torch.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def load_model(path: str, attention: str, device: torch.device, *, auto: bool = False) -> PreTrainedModel:
    """Load a model in float32 and in eval mode: without dropout, its log-probs equal those of the engines.

    `auto`: another attention may be chosen if the architecture lacks `attention`. Raises ConfigError naming the fault.
    """
    folder = check_folder(path)
    from transformers.utils import logging

    logging.disable_progress_bar()

    def load(attention: str) -> Any:
        return loader(folder).from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True, use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True,  # check_complete refuses them
        )  # fmt: skip

    try:
        model, report = load_attending(load, _json(folder, "config.json"), attention, ATTENTION, auto=auto)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises errors of many types for a faulty folder
        raise ConfigError(FIELD, path, f"transformers can't load it ({first_line(error)}); check the folder") from error
    check_complete(path, report)
    check_attends(path, model)
    return model.to(device).eval()  # type: ignore[no-any-return]


def loader(folder: Path) -> Any:
    """Return the auto class of transformers that loads the folder: multimodal for media inputs, else causal."""
    import transformers

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return transformers.AutoModelForMultimodalLM if has_towers(config) else transformers.AutoModelForCausalLM


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_complete(path: str, report: Mapping[str, Any]) -> None:
    """Raise ConfigError if weights are missing or misshapen; transformers would fill them with random numbers."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            FIELD, path, f"the weights lack {', '.join(missing[:4])} ({len(missing)} in all); save the model again"
        )
    if report["mismatched_keys"]:
        name, saved, wanted = sorted(report["mismatched_keys"])[0]
        shapes = f"{tuple(saved)} in its weights but {tuple(wanted)} by its config.json"
        raise ConfigError(FIELD, path, f"{name} is {shapes}; save the model again")


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's weights under its own names; tied weights appear once."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def named_tensors(model: PreTrainedModel, adapters: Adapters | None = None) -> dict[str, Tensor]:
    """Return the model's weights without adapters, under the names of a Hugging Face folder, as writable views.

    Raises ConfigError if a sharded tensor fuses several tensors of the folder.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own = own_tensors(model) if adapters is None else adapters.below(own_tensors(model))
    parts = parts_of(own, lambda tensors: revert_weight_conversion(model, tensors))
    fused = {part.source for part in parts.values()}
    if shared := sorted(name for name in fused if local(own[name]) is not own[name]):
        fix = "it fuses several tensors of the folder, which can't be loaded into shards: choose none for this role"
        raise ConfigError("trainer.sharding", f"fsdp with {shared[0]}", fix)
    kept = {name: tensor for name, tensor in own.items() if name not in fused}
    return {**kept, **{name: part.of(own) for name, part in parts.items()}}


def whole_tensors(model: PreTrainedModel, keep: bool = True, adapters: Adapters | None = None) -> dict[str, Tensor]:
    """Return whole weights under the names of a Hugging Face folder, with adapters folded in.

    All ranks must call: shards are gathered from each. `keep`: False returns an empty dict on this rank.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own = gathered(own_tensors(model), keep)
    if not keep:
        return {}
    return dict(revert_weight_conversion(model, own if adapters is None else adapters.folded(own)))


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


def export_folder(
    model: PreTrainedModel, state: Mapping[str, Tensor], files: TokenizerFiles, directory: Path, dtype: torch.dtype
) -> None:
    """Write a folder that transformers' auto classes load, with the tokenizer and chat template of the run.

    `state`: whole weights under the model's own names; floating-point weights are written in `dtype`.
    """
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    before = model.config.dtype
    model.config.dtype = dtype
    try:
        model.save_pretrained(directory, state_dict=state)
    finally:
        model.config.dtype = before
    files.write(directory)


FIELD, ATTENTION = "model.path", "trainer.attention"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check_folder(path: str) -> Path:
    """Return the folder of a model; raise ConfigError naming the file or setting that the folder lacks."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(FIELD, path, "the folder does not exist; name a local Hugging Face model folder")
    config = _json(folder, "config.json")
    if "model_type" not in config:
        raise ConfigError(FIELD, path, "the config.json has no model_type; name a Hugging Face model folder")
    if config.get("thinker_config"):
        fix = "save `.thinker` of the loaded transformers model, with tokenizer and processor, as a folder of its own"
        raise ConfigError(FIELD, f"{path} with a talker beside the thinker", fix)
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
    shards = _json(folder, _INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise ConfigError(FIELD, folder, f"the file {_INDEX} has no weight_map; save the model again")
    return sorted(set(shards.values()))


def _json(folder: Path, name: str) -> dict[str, Any]:
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
