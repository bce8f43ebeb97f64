# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA): choose the modules that peft adapts, name their tensors, fold adapters into the base.

The base model is frozen. Folding reads whole tensors by name, so it works for a copy of the model and for gathered
shards. An engine that adds an adapter to its own base computes the same: base + scale * B A in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from relax_core.api import ConfigError, TrainerSpec
from relax_core.trainer_kit.lora import FIELD, NAME, LoraTable, base_name, matrix, peft_name, short_names
from relax_core.trainer_kit.setup import TRAINED_ROLES
from relax_plugin_torch.freezing import found, freeze, frozen_in, named

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

SCALAR_HEAD = "score"
"""Name of the scalar head. The head may start at zero, so all of its weights are trained, without an adapter."""


class Adapters:
    """The adapters of one rank's model."""

    def __init__(self, model: PreTrainedModel, table: LoraTable, seed: int) -> None:
        """Add adapters to the model; their initial values depend only on `seed`, so they are equal on every rank.

        If the table names no `targets`, the decoder's trained linear layers get adapters. Raises ConfigError for
        modules that can't have an adapter.
        """
        self.table = table
        self._task = "SEQ_CLS" if model.get_output_embeddings() is None else "CAUSAL_LM"
        self.modules = targets(model, self.table.targets)
        whole = modules_to_save(model, self.table.modules_to_save, self.modules)
        refuse_tied(model, self.modules, whole)
        from peft import inject_adapter_in_model

        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            inject_adapter_in_model(_peft_config(self.table, self.modules), model, NAME)
        self._names = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        for part in whole:
            part.requires_grad_(True)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._whole = frozenset(trained - self._names)
        self.base = ""
        """Fingerprint of the base model as published; the rank sets it before training starts."""

    # -- names ----------------------------------------------------------------------------------------------------

    def below(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the base model's tensors under the names that they have without adapters."""
        return {base_name(name): tensor for name, tensor in own.items() if name not in self._names}

    def kept(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that training changes."""
        return {name: tensor for name, tensor in own.items() if name in self._names or name in self._whole}

    def alone(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that training changes, under peft's names."""
        return {peft_name(name): tensor for name, tensor in self.kept(own).items()}

    # -- folding --------------------------------------------------------------------------------------------------

    def folded(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the base's weights with the adapters folded in; folded tensors are in host memory."""
        state, modules = self.below(own), frozenset(self.modules)
        for name, weight in state.items():
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in modules:
                state[name] = self._fold(own, module, weight).cpu()
        return state

    @torch.no_grad()
    def _fold(self, own: Mapping[str, Tensor], module: str, weight: Tensor) -> Tensor:
        low_rank = own[matrix(module, "B")] @ own[matrix(module, "A")]
        whole = weight.float() + self.table.scale * low_rank
        if self.table.dora:
            magnitude = own[f"{module}.lora_magnitude_vector.{NAME}.weight"]
            whole = (magnitude / torch.linalg.norm(whole, dim=1))[:, None] * whole
        return whole.to(weight.dtype)

    @torch.no_grad()
    def clear(self, model: nn.Module) -> None:
        """Set every matrix B to 0, so that the model computes the same as its base."""
        for name, parameter in model.named_parameters():
            if name in self._names and ".lora_B." in name:
                parameter.zero_()

    # -- export ---------------------------------------------------------------------------------------------------

    def write(self, own: Mapping[str, Tensor], base_path: str, directory: Path) -> None:
        """Write the adapters to a folder that `PeftModel.from_pretrained` loads on top of the base model."""
        from safetensors.torch import save_file

        directory.mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.alone(own).items()}
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        layers = tuple(name.removesuffix(".weight") for name in self.below(own) if name.endswith(".weight"))
        config = _peft_config(self.table, short_names(self.modules, layers))
        config.modules_to_save = list(self.table.modules_to_save) or None
        config.base_model_name_or_path, config.inference_mode, config.task_type = base_path, True, self._task
        config.save_pretrained(str(directory))


def choose_trained(model: PreTrainedModel, spec: TrainerSpec) -> Adapters | None:
    """Freeze the parts that `[model]` names and add adapters; return the adapters, or None if the model gets none.

    `actor_fwd` is the only untrained role with adapters, and only with adapters that can be published without the base.
    A critic has the policy's body with a different head, so patterns that match no part of its model are skipped.
    """
    table, frozen = spec.model.get("lora"), tuple(spec.model.get("freeze") or ())
    if spec.role == "actor_fwd" and table and LoraTable.of(table).plain:
        freeze(model, frozen)  # the actor's frozen layers have no adapters either
        return Adapters(model, LoraTable.of(table), spec.seed)
    if spec.role not in TRAINED_ROLES:
        return None
    chosen = LoraTable.of(table) if table else None
    if spec.role == "critic":
        frozen = _there(model, frozen)
        chosen = chosen and chosen.with_parts(_there(model, chosen.targets), _there(model, chosen.modules_to_save))
    freeze(model, frozen)
    if chosen is None:
        return None
    if model.get_output_embeddings() is None and SCALAR_HEAD not in chosen.modules_to_save:
        chosen = chosen.with_parts(chosen.targets, (*chosen.modules_to_save, SCALAR_HEAD))
    return Adapters(model, chosen, spec.seed)


def _there(model: PreTrainedModel, patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if any(named(model, pattern)))


def _peft_config(table: LoraTable, modules: tuple[str, ...]) -> LoraConfig:
    from peft import LoraConfig

    alpha: Any = int(table.alpha) if float(table.alpha).is_integer() else table.alpha
    return LoraConfig(
        r=table.rank, lora_alpha=alpha, lora_dropout=table.dropout, target_modules=list(modules), bias="none",
        use_rslora=table.rslora, use_dora=table.dora,
    )  # fmt: skip


def targets(model: PreTrainedModel, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of linear layers that `patterns` match; without patterns, of all trained layers of the decoder.

    The decoder excludes the head. Raises ConfigError for a pattern that matches no linear layer, or a frozen layer.
    """
    linear = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not patterns:
        inside = model.get_decoder().modules()
        names = [linear[module] for module in inside if module in linear and module.weight.requires_grad]
        if not names:
            raise ConfigError(FIELD, type(model).__name__, "no linear layer of its decoder is trained; leave lora out")
        return tuple(names)
    meant: dict[str, None] = {}
    for pattern in patterns:
        parts = [part for _, part in found(model, pattern, f"{FIELD}.targets") if isinstance(part, nn.Module)]
        layers = [(linear[m], m) for part in parts for m in part.modules() if m in linear]
        if not layers:
            raise ConfigError(f"{FIELD}.targets", repr(pattern), "it matches no linear layer; name a module with one")
        _refuse_frozen(frozen_in(layers), f"{FIELD}.targets", pattern)
        meant |= dict.fromkeys(name for name, _ in layers)
    return tuple(meant)


def modules_to_save(model: PreTrainedModel, patterns: tuple[str, ...], adapted: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules whose own weights are all trained, in addition to the adapters."""
    field, modules = f"{FIELD}.modules_to_save", []
    layers = {id(model.get_submodule(name)): name for name in adapted}
    for pattern in patterns:
        parts = found(model, pattern, field)
        _refuse_frozen(frozen_in(parts), field, pattern)
        for name, part in parts:
            if not isinstance(part, nn.Module):
                raise ConfigError(field, name, "this is a parameter; name the module that it belongs to")
            if both := [layers[id(module)] for module in part.modules() if id(module) in layers]:
                fix = f"{both[0]} gets an adapter; restrict model.lora.targets to other modules"
                raise ConfigError(field, repr(pattern), fix)
            modules.append(part)
    return modules


def _refuse_frozen(frozen: list[str], field: str, got: str) -> None:
    if frozen:
        raise ConfigError(field, repr(got), f"model.freeze freezes {frozen[0]}; name it in only one of the two")


def refuse_tied(model: PreTrainedModel, modules: tuple[str, ...], whole: list[nn.Module]) -> None:
    """Raise ConfigError if a weight that head and embedding share would get an adapter or be trained whole.

    An adapter of the head would not change the embedding, and peft would save the shared weight under one name only.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is None or head.weight is not embedding:
        return
    saved = any(parameter is embedding for part in whole for parameter in part.parameters())
    field = "modules_to_save" if saved else "targets"
    if saved or any(model.get_submodule(name) is head for name in modules):
        fix = "head and input embedding share one weight, and the two would come apart; leave it out"
        raise ConfigError(f"{FIELD}.{field}", "the head or the embedding", fix)


_PRIME = 1_000_003


class Dropout:
    """Dropout in the adapters of one rank's model, active only while an update accumulates gradients.

    Forward passes therefore score with the policy as it is published. Dropout masks depend only on the update, the rank
    and the chunk. So ranks with different micro-batches keep equal global random states, and a resumed run draws the
    same masks.
    """

    def __init__(self, model: nn.Module, rank: int, device: torch.device, adapters: Adapters | None) -> None:
        wanted = adapters is not None and adapters.table.dropout > 0
        self._layers = [module for module in model.modules() if wanted and hasattr(module, "lora_dropout")]
        self._rank, self._devices = rank, [device] if device.type == "cuda" else []
        self._draw = self._chunk = 0

    def begin(self) -> None:
        """Draw the seed of an update's dropout masks; every rank draws the same seed."""
        if self._layers:
            self._draw, self._chunk = int(torch.randint(2**31, ())), 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Turn dropout on for the computation of one chunk."""
        if not self._layers:
            yield
            return
        self._chunk += 1
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(((self._draw * _PRIME + self._rank) * _PRIME + self._chunk) % 2**63)
            for layer in self._layers:  # peft's layers check their own training mode, not only their dropout's
                layer.train(True)
            try:
                yield
            finally:
                for layer in self._layers:
                    layer.train(False)
