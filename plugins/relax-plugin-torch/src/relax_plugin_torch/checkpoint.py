# SPDX-License-Identifier: Apache-2.0
"""All that ranks need to continue bit for bit: weights and moments as safetensors, the rest as JSON. No pickle.

What lies on disk is whole, gathered from all ranks and written by the first, so it loads on any number of them. The
random state is the first rank's: everyone continues with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_core.api import ConfigError
from relax_plugin_torch.atomic import new_directory
from relax_plugin_torch.model import own_tensors
from relax_plugin_torch.random_state import random_state, restore_random_state
from relax_plugin_torch.sharding import gathered, share_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from relax_plugin_torch.adapters import Adapters


SCHEMA = 1
_WEIGHTS, _MOMENTS, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_FIELD = "checkpoint"


def save_checkpoint(
    directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: dict[str, Any], first: bool = True,
    adapters: Adapters | None = None,
) -> None:  # fmt: skip
    """All ranks call; the first one writes. Of adapters nothing below them: only which base that is."""
    weights = gathered(_kept(model, adapters), first)
    moments = gathered(_moments(model, optimizer), first)
    if not first:
        return
    with new_directory(directory) as path:
        save_file(weights, path / _WEIGHTS)
        save_file(moments, path / _MOMENTS)
        base = adapters.base if adapters is not None else ""
        text = json.dumps({"schema": SCHEMA, "random": random_state(), "base": base, **state})
        (path / _STATE).write_text(text, encoding="utf-8")


def load_checkpoint(
    directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, adapters: Adapters | None = None
) -> dict[str, Any]:
    """Restore weights, moments and random state; returns what else was saved."""
    state, weights, moments = _read(Path(directory))
    own = _kept(model, adapters)
    _check_base(directory, state.get("base", ""), adapters)
    have, want = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (weights, own))
    if have != want:
        differing = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
        raise ConfigError(
            _FIELD, directory, f"it is of another architecture ({', '.join(differing[:3])} differ); use its own model"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(share_like(tensor, weights[name]))
    _restore_moments(model, optimizer, moments)
    restore_random_state(state["random"])
    return state


def _kept(model: PreTrainedModel, adapters: Adapters | None) -> dict[str, Tensor]:
    own = own_tensors(model)
    return own if adapters is None else adapters.kept(own)


def _check_base(directory: str, saved: str, adapters: Adapters | None) -> None:
    base = adapters.base if adapters is not None else ""
    if saved == base:
        return
    if not (saved and base):
        has, needs = ("adapters", "no [model.lora]") if saved else ("a whole model", "[model.lora]")
        raise ConfigError(_FIELD, directory, f"it holds {has} and this run has {needs}; train as it was trained")
    fix = f"its adapters lie on model {saved}, and model.path holds {base}; name the model it was trained from"
    raise ConfigError(_FIELD, directory, fix)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        weights, moments = load_file(path / _WEIGHTS), load_file(path / _MOMENTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(_FIELD, path, f"it can't be read ({error}); resume from another checkpoint") from error
    if state.get("schema") != SCHEMA:
        raise ConfigError(
            _FIELD, path, f"its schema is {state.get('schema')}, not {SCHEMA}; use the relax that wrote it"
        )
    return state, weights, moments


def _moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<moment>`: by name, so that it does not hang on the optimizer's order."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{named[parameter]}/{moment}": torch.as_tensor(value)
        for parameter, values in optimizer.state.items()
        for moment, value in values.items()
    }


def _restore_moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in moments.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters[name]
        optimizer.state[parameter][moment] = share_like(parameter, value.to(parameter.device))
