# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that resume training bit for bit: a file of weights and moments from each rank, and `state.json`.

Every rank writes its own shards, so no rank gathers the whole model, and any number of ranks can read the files
(`shards.py`). `state.json` holds the number of files, the progress, and the first rank's random state, which all ranks
restore.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from relax_core.api import ConfigError, DiskFull, InfrastructureError, disk_error
from relax_core.tensor_files.whole_folder import new_folder, replace_folder
from relax_plugin_torch.model import own_tensors
from relax_plugin_torch.optimizer import joined, parts
from relax_plugin_torch.shards import Piece, Stored, copied, file_name, read_into, stored, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from relax_plugin_torch.adapters import Adapters
    from relax_plugin_torch.ranks import Ranks

SCHEMA = 2
_STATE = "state.json"
_WEIGHTS, _MOMENTS = "model.", "optimizer."
"""Prefixes of the names of weights and of optimizer moments in the files."""
_FIELD = "checkpoint"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a rank's part of a checkpoint, so that training continues while the copy is written."""

    pieces: Mapping[str, Piece]
    state: str
    """Text of `state.json` on the first rank, else empty."""
    rank: int

    @classmethod
    def take(
        cls, model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks,
        adapters: Adapters | None = None,
    ) -> Snapshot:  # fmt: skip
        """Copy the rank's state. With adapters, the frozen base is not copied; only its fingerprint is kept."""
        base = adapters.base if adapters is not None else ""
        more = {"schema": SCHEMA, "ranks": ranks.size, "random": random_state(), "base": base}
        tensors = _named(_WEIGHTS, _kept(model, adapters)) | _named(_MOMENTS, _moments(model, optimizer))
        return cls(copied(tensors, ranks.first), json.dumps({**more, **state}) if ranks.first else "", ranks.rank)

    def write(self, directory: Path) -> None:
        """Write the rank's files and flush them to disk. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        write(self.pieces, directory / file_name(self.rank))
        if self.state:
            with (directory / _STATE).open("w", encoding="utf-8") as file:
                file.write(self.state)
                file.flush()
                os.fsync(file.fileno())


def save_checkpoint(snapshot: Snapshot, directory: str, ranks: Ranks) -> None:
    """Write a checkpoint; it replaces `directory` only after all ranks have written their files.

    All ranks must call. If a rank fails, all ranks raise InfrastructureError, or DiskFull if that rank's disk is full.
    """
    final = Path(directory)
    unfinished = final.with_name(f".{final.name}.saving")
    if ranks.first:
        shutil.rmtree(unfinished, ignore_errors=True)
    ranks.tell("")
    said = _tried(directory, lambda: snapshot.write(unfinished))
    failed = next((one for one in ranks.tell(said) if one), [])
    if not failed:
        failed = ranks.tell(_tried(directory, lambda: replace_folder(unfinished, final)) if ranks.first else [])[0]
    elif ranks.first:
        shutil.rmtree(unfinished, ignore_errors=True)
    if failed:
        full, message = failed
        raise (DiskFull if full else InfrastructureError)(message)


def _tried(directory: str, work: Callable[[], None]) -> list[Any]:
    """Call `work`; return [] for success, or after an OSError [True if the disk is full, message] for all ranks."""
    try:
        work()
    except OSError as error:
        said = unwritten(directory, error)
        return [isinstance(said, DiskFull), str(said)]
    return []


def unwritten(directory: str, error: OSError | SafetensorError) -> InfrastructureError:
    """Return the error for a checkpoint or folder that could not be written: DiskFull if the disk is full."""
    if not isinstance(error, OSError):  # safetensors gives the error number only in its text
        number = re.search(r"os error (\d+)", str(error))
        error = OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))
    return disk_error(directory, error)


def load_checkpoint(
    directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, adapters: Adapters | None = None,
    kind: str = "adamw",
) -> dict[str, Any]:  # fmt: skip
    """Restore weights, moments and random state; return the saved `state.json`.

    Raises ConfigError for a checkpoint that is incomplete or does not fit the model, its adapters or its optimizer.
    """
    path = Path(directory)
    state, found = _look(path)
    own = _kept(model, adapters)
    if (saved := state.get("optimizer", kind)) != kind:
        fix = f"it holds the state of {saved} and this run has {kind}; set trainer.optimizer = {saved}"
        raise ConfigError(_FIELD, directory, fix)
    _check_base(directory, state.get("base", ""), adapters)
    have = {name.removeprefix(_WEIGHTS): one.shape for name, one in found.items() if name.startswith(_WEIGHTS)}
    want = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if have != want:
        differing = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
        raise ConfigError(
            _FIELD, directory, f"saved from another architecture ({', '.join(differing[:3])} differ); use that model"
        )
    moments = {name.removeprefix(_MOMENTS): one for name, one in found.items() if name.startswith(_MOMENTS)}
    parameters, room = dict(model.named_parameters()), {}
    for name, one in moments.items():  # a moment with its parameter's shape is sharded like the parameter
        parameter = parameters[name.rpartition("/")[0]]
        if tuple(parameter.shape) == one.shape:
            room[name] = torch.zeros_like(parameter, dtype=one.dtype, requires_grad=False)
        else:
            room[name] = torch.zeros(one.shape, dtype=one.dtype, device=parameter.device)
    try:
        read_into(_named(_WEIGHTS, own) | _named(_MOMENTS, room), path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(_FIELD, path, f"files can't be read ({error}); resume from another checkpoint") from error
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


def _check_base(directory: str, saved: str, adapters: Adapters | None) -> None:
    base = adapters.base if adapters is not None else ""
    if saved == base:
        return
    if not (saved and base):
        has, needs = ("adapters", "no [model.lora]") if saved else ("a whole model", "[model.lora]")
        raise ConfigError(
            _FIELD, directory, f"saved with {has}, but this run has {needs}; set [model.lora] as when it was saved"
        )
    fix = f"its adapters belong to model {saved}, but model.path holds {base}; set model.path to model {saved}"
    raise ConfigError(_FIELD, directory, fix)


def _look(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the saved `state.json` and a description of every tensor; raise ConfigError if a file is missing."""
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if state.get("schema") != SCHEMA:
            raise ConfigError(
                _FIELD, path, f"the schema is {state.get('schema')}, not {SCHEMA}; use the relax version that wrote it"
            )
        missing = [name for name in map(file_name, range(state["ranks"])) if not (path / name).is_file()]
        if missing:
            raise ConfigError(_FIELD, path, f"the folder lacks {', '.join(missing[:3])}; resume from a whole one")
        return state, stored(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(_FIELD, path, f"files can't be read ({error}); resume from another checkpoint") from error


def _moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return optimizer moments by `<parameter>/<moment>`, names that do not depend on the order of parameters."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{named[parameter]}/{moment}{'.' if part else ''}{part}": plain
        for parameter, values in optimizer.state.items()
        for moment, value in values.items()
        for part, plain in parts(value).items()
    }


class Writing:
    """A thread that writes one rank's checkpoints one at a time while the rank trains; `over` raises its errors."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None
        self._directory = ""

    def write(self, snapshot: Snapshot, directory: str) -> None:
        """Start writing a snapshot. The previous write must have ended."""
        self._last, self._directory = self._thread.submit(snapshot.write, Path(directory)), directory

    async def over(self) -> None:
        """Wait until the snapshot is on disk. Raises InfrastructureError if writing it failed."""
        if self._last is None:
            return
        try:
            await asyncio.wrap_future(self._last)
        except OSError as error:
            raise unwritten(self._directory, error) from error

    def stop(self) -> None:
        """Stop without waiting. A write in progress still runs to its end, but its checkpoint is not used."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the global random states of Python, numpy and torch as JSON data, so that a checkpoint needs no pickle."""
    version, keys, gauss = random.getstate()
    name, numpy_keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(keys), gauss],
        "numpy": [name, np.asarray(numpy_keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_initialized()
        else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(numpy_keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all([_bytes(one) for one in state["cuda"]])


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@contextmanager
def new_directory(directory: str) -> Iterator[Path]:
    """Yield a temporary directory to write to; it replaces `directory` only if the `with` block succeeds.

    Raises InfrastructureError if writing fails.
    """
    try:
        with new_folder(Path(directory)) as unfinished:
            yield unfinished
    except (OSError, SafetensorError) as error:
        raise unwritten(directory, error) from error
