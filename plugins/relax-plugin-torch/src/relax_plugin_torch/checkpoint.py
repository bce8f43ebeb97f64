# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that resume training bit for bit: weights and moments as shards of each rank (`trainer_kit.checkpoint`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from relax_core.api import ConfigError
from relax_core.trainer_kit.checkpoint import (
    FIELD,
    MOMENTS,
    WEIGHTS,
    Snapshot,
    check_architecture,
    check_base,
    look,
    restore_random_state,
)
from relax_core.trainer_kit.shards import read_into
from relax_plugin_torch.model import own_tensors
from relax_plugin_torch.optimizer import joined, parts
from relax_plugin_torch.shards import copied

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from relax_core.trainer_kit.ranks import Ranks
    from relax_plugin_torch.adapters import Adapters


def take_snapshot(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks,
    adapters: Adapters | None = None,
) -> Snapshot:  # fmt: skip
    """Copy the rank's state. With adapters, the frozen base is not copied; only its fingerprint is kept."""
    base = adapters.base if adapters is not None else ""
    tensors = _named(WEIGHTS, _kept(model, adapters)) | _named(MOMENTS, _moments(model, optimizer))
    return Snapshot.of(copied(tensors, ranks.first), {"base": base, **state}, ranks)


def load_checkpoint(
    directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, adapters: Adapters | None = None,
    kind: str = "adamw",
) -> dict[str, Any]:  # fmt: skip
    """Restore weights, moments and random state; return the saved `state.json`.

    Raises ConfigError for a checkpoint that is incomplete or does not fit the model, its adapters or its optimizer.
    """
    path = Path(directory)
    state, found = look(path)
    own = _kept(model, adapters)
    if (saved := state.get("optimizer", kind)) != kind:
        fix = f"it holds the state of {saved} and this run has {kind}; set trainer.optimizer = {saved}"
        raise ConfigError(FIELD, directory, fix)
    check_base(directory, state.get("base", ""), adapters.base if adapters is not None else "")
    check_architecture(directory, found, {name: tuple(tensor.shape) for name, tensor in own.items()})
    moments = {name.removeprefix(MOMENTS): one for name, one in found.items() if name.startswith(MOMENTS)}
    parameters, room = dict(model.named_parameters()), {}
    for name, one in moments.items():  # a moment with its parameter's shape is sharded like the parameter
        parameter = parameters[name.rpartition("/")[0]]
        if tuple(parameter.shape) == one.shape:
            room[name] = torch.zeros_like(parameter, dtype=one.dtype, requires_grad=False)
        else:
            room[name] = torch.zeros(one.shape, dtype=one.dtype, device=parameter.device)
    try:
        read_into(_named(WEIGHTS, own) | _named(MOMENTS, room), path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(FIELD, path, f"files can't be read ({error}); resume from another checkpoint") from error
    optimizer.state.clear()
    plain_parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, value in room.items():
        name, _, rest = key.rpartition("/")
        moment, _, part = rest.partition(".")
        plain_parts.setdefault((name, moment), {})[part] = value
    for (name, moment), plain in plain_parts.items():
        optimizer.state[parameters[name]][moment] = joined(plain, moment)
    restore_random_state(state["random"])
    return state


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _kept(model: PreTrainedModel, adapters: Adapters | None) -> dict[str, Tensor]:
    own = own_tensors(model)
    return own if adapters is None else adapters.kept(own)


def _moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return optimizer moments by `<parameter>/<moment>`, names that do not depend on the order of parameters."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{named[parameter]}/{moment}{'.' if part else ''}{part}": plain
        for parameter, values in optimizer.state.items()
        for moment, value in values.items()
        for part, plain in parts(value).items()
    }
