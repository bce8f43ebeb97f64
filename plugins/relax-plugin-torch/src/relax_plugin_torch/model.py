# SPDX-License-Identifier: Apache-2.0
"""Loading and exporting of Hugging Face model folders, and access to a model's tensors under the folder's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relax_core.api import ConfigError
from relax_core.learn.attention import check_attends, load_attending
from relax_core.learn.huggingface import parts_of
from relax_core.trainer_kit.model_folder import FIELD, check_folder, first_line, has_towers, read_json
from relax_core.trainer_kit.tokenizer_files import TokenizerFiles
from relax_plugin_torch.adapters import Adapters
from relax_plugin_torch.sharding import gathered, local

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "trainer.attention"


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
        model, report = load_attending(load, read_json(folder, "config.json"), attention, ATTENTION, auto=auto)
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
