# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model get adapters, and which are trained whole beside them. What can't be is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from relax_core.api import ConfigError
from relax_plugin_torch.freezing import found, frozen_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELD = "model.lora"


def targets(model: PreTrainedModel, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the linear layers that are meant; by default all that are trained in the decoder, not its head."""
    linear = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not patterns:
        inside = model.get_decoder().modules()
        names = [linear[module] for module in inside if module in linear and module.weight.requires_grad]
        if not names:
            raise ConfigError(FIELD, type(model).__name__, "its decoder has no linear layer to train; leave lora out")
        return tuple(names)
    meant: dict[str, None] = {}
    for pattern in patterns:
        parts = [part for _, part in found(model, pattern, f"{FIELD}.targets") if isinstance(part, nn.Module)]
        layers = [(linear[m], m) for part in parts for m in part.modules() if m in linear]
        if not layers:
            raise ConfigError(f"{FIELD}.targets", repr(pattern), "there is no linear layer in it; name one that has")
        _refuse_frozen(frozen_in(layers), f"{FIELD}.targets", pattern)
        meant |= dict.fromkeys(name for name, _ in layers)
    return tuple(meant)


def modules_to_save(model: PreTrainedModel, patterns: tuple[str, ...], adapted: tuple[str, ...]) -> list[nn.Module]:
    """Modules that are trained whole beside the adapters."""
    field, modules = f"{FIELD}.modules_to_save", []
    layers = {id(model.get_submodule(name)): name for name in adapted}
    for pattern in patterns:
        parts = found(model, pattern, field)
        _refuse_frozen(frozen_in(parts), field, pattern)
        for name, part in parts:
            if not isinstance(part, nn.Module):
                raise ConfigError(field, name, "that is a parameter; name the module that it belongs to")
            if both := [layers[id(module)] for module in part.modules() if id(module) in layers]:
                fix = f"{both[0]} gets an adapter; name in model.lora.targets the modules that shall"
                raise ConfigError(field, repr(pattern), fix)
            modules.append(part)
    return modules


def _refuse_frozen(frozen: list[str], field: str, got: str) -> None:
    if frozen:
        raise ConfigError(field, repr(got), f"model.freeze keeps {frozen[0]} as it is; name it in one of the two")


def refuse_tied(model: PreTrainedModel, modules: tuple[str, ...], whole: list[nn.Module]) -> None:
    """A weight in two places can't have an adapter in one of them, and peft would save it under one name only."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is None or head.weight is not embedding:
        return
    saved = any(parameter is embedding for part in whole for parameter in part.parameters())
    field = "modules_to_save" if saved else "targets"
    if saved or any(model.get_submodule(name) is head for name in modules):
        fix = "the head's weight is the input embedding's too and would come apart; leave it out"
        raise ConfigError(f"{FIELD}.{field}", "the head or the embedding", fix)
