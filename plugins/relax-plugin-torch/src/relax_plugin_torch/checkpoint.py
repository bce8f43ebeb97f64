# SPDX-License-Identifier: Apache-2.0
"""All that ranks need to continue bit for bit: weights and moments as each rank has them (`shards`), the rest as JSON.

Every rank copies its own and writes it, so none has to hold the whole, and any number of ranks reads it. The random state
is the first rank's: everyone continues with it. `state.json` says how many files there must be.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from relax_core.api import ConfigError, InfrastructureError
from relax_plugin_torch.atomic import replace
from relax_plugin_torch.model import own_tensors
from relax_plugin_torch.optimizer import joined, parts
from relax_plugin_torch.random_state import random_state, restore_random_state
from relax_plugin_torch.shards import Piece, Stored, copied, file_name, read_into, stored, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from relax_plugin_torch.adapters import Adapters
    from relax_plugin_torch.ranks import Ranks


SCHEMA = 2
_STATE = "state.json"
_WEIGHTS, _MOMENTS = "model.", "optimizer."
"""Before the names of tensors."""
_FIELD = "checkpoint"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of a checkpoint, copied: training may go on while it is written."""

    pieces: Mapping[str, Piece]
    state: str
    """Of the first rank."""
    rank: int

    @classmethod
    def take(
        cls, model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks,
        adapters: Adapters | None = None,
    ) -> Snapshot:  # fmt: skip
        """Copy the rank's state. With adapters, of the weights below them only the base's fingerprint is kept."""
        base = adapters.base if adapters is not None else ""
        more = {"schema": SCHEMA, "ranks": ranks.size, "random": random_state(), "base": base}
        tensors = _named(_WEIGHTS, _kept(model, adapters)) | _named(_MOMENTS, _moments(model, optimizer))
        return cls(copied(tensors, ranks.first), json.dumps({**more, **state}) if ranks.first else "", ranks.rank)

    def write(self, directory: Path) -> None:
        """On disk when it returns. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        write(self.pieces, directory / file_name(self.rank))
        if self.state:
            with (directory / _STATE).open("w", encoding="utf-8") as file:
                file.write(self.state)
                file.flush()
                os.fsync(file.fileno())


def save_checkpoint(snapshot: Snapshot, directory: str, ranks: Ranks) -> None:
    """All ranks call: it takes the place of `directory` once all have written. Raises InfrastructureError on all of them."""
    final = Path(directory)
    unfinished = final.with_name(f".{final.name}.saving")
    said = _tried(lambda: shutil.rmtree(unfinished, ignore_errors=True)) if ranks.first else ""
    ranks.tell(said)
    said = _tried(lambda: snapshot.write(unfinished))
    failed = next((one for one in ranks.tell(said) if one), "")
    if ranks.first:
        if failed:
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            failed = _tried(lambda: replace(unfinished, final))
    failed = failed or str(ranks.tell(failed)[0])
    if failed:
        raise unwritten(directory, failed)


def unwritten(directory: str, why: str) -> InfrastructureError:
    """A checkpoint that could not be written."""
    return InfrastructureError(f"{directory}: can't be written ({why}); free some room")


def _tried(work: Callable[[], None]) -> str:
    """Try the work and return what went wrong, so that other ranks, which wait for it, can be told; empty where nothing
    did."""
    try:
        work()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def load_checkpoint(
    directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, adapters: Adapters | None = None,
    kind: str = "adamw",
) -> dict[str, Any]:  # fmt: skip
    """Restore weights, moments and random state; returns what else was saved."""
    path = Path(directory)
    state, found = _look(path)
    own = _kept(model, adapters)
    _check_optimizer(directory, state.get("optimizer", kind), kind)
    _check_base(directory, state.get("base", ""), adapters)
    have = {name.removeprefix(_WEIGHTS): one.shape for name, one in found.items() if name.startswith(_WEIGHTS)}
    want = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if have != want:
        differing = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
        raise ConfigError(
            _FIELD, directory, f"it is of another architecture ({', '.join(differing[:3])} differ); use its own model"
        )
    moments = {name.removeprefix(_MOMENTS): one for name, one in found.items() if name.startswith(_MOMENTS)}
    room = _room(model, moments)
    try:
        read_into(_named(_WEIGHTS, own) | _named(_MOMENTS, room), path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(_FIELD, path, f"it can't be read ({error}); resume from another checkpoint") from error
    _restore_moments(model, optimizer, room)
    restore_random_state(state["random"])
    return state


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _kept(model: PreTrainedModel, adapters: Adapters | None) -> dict[str, Tensor]:
    own = own_tensors(model)
    return own if adapters is None else adapters.kept(own)


def _check_optimizer(directory: str, saved: str, kind: str) -> None:
    if saved != kind:
        fix = f"it holds the state of {saved} and this run has {kind}; set trainer.optimizer = {saved}"
        raise ConfigError(_FIELD, directory, fix)


def _check_base(directory: str, saved: str, adapters: Adapters | None) -> None:
    base = adapters.base if adapters is not None else ""
    if saved == base:
        return
    if not (saved and base):
        has, needs = ("adapters", "no [model.lora]") if saved else ("a whole model", "[model.lora]")
        raise ConfigError(_FIELD, directory, f"it holds {has} and this run has {needs}; train as it was trained")
    fix = f"its adapters lie on model {saved}, and model.path holds {base}; name the model it was trained from"
    raise ConfigError(_FIELD, directory, fix)


def _look(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Read the rest of the saved state and the tensors that are there: all of them, or ConfigError."""
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if state.get("schema") != SCHEMA:
            raise ConfigError(
                _FIELD, path, f"its schema is {state.get('schema')}, not {SCHEMA}; use the relax that wrote it"
            )
        missing = [name for name in map(file_name, range(state["ranks"])) if not (path / name).is_file()]
        if missing:
            raise ConfigError(_FIELD, path, f"it lacks {', '.join(missing[:3])}; resume from another checkpoint")
        return state, stored(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(_FIELD, path, f"it can't be read ({error}); resume from another checkpoint") from error


def _moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<moment>`: by name, so that it does not hang on the optimizer's order."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{named[parameter]}/{moment}{'.' if part else ''}{part}": plain
        for parameter, values in optimizer.state.items()
        for moment, value in values.items()
        for part, plain in parts(value).items()
    }


def _room(model: PreTrainedModel, moments: Mapping[str, Stored]) -> dict[str, Tensor]:
    """For moments that will be read: shared out as their parameters are where they have their shape."""
    parameters, room = dict(model.named_parameters()), {}
    for name, one in moments.items():
        own = parameters[name.rpartition("/")[0]]
        alike = tuple(own.shape) == one.shape
        room[name] = (
            torch.zeros_like(own, dtype=one.dtype, requires_grad=False)
            if alike
            else torch.zeros(one.shape, dtype=one.dtype, device=own.device)
        )
    return room


def _restore_moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, value in moments.items():
        name, _, rest = key.rpartition("/")
        moment, _, part = rest.partition(".")
        found.setdefault((name, moment), {})[part] = value
    for (name, moment), plain in found.items():
        optimizer.state[parameters[name]][moment] = joined(plain, moment)
