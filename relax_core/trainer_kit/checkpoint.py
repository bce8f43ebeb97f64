# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders of several ranks: written whole or not at all, in the background if asked.

Each rank writes its own pieces of weights and optimizer moments, so no rank gathers the whole model, and any number of
ranks can read the files (`shards.py`). `state.json` holds the number of files, the progress, and the first rank's random
state, which all ranks restore.
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
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError

from relax_core.api import ConfigError, DiskFull, InfrastructureError, disk_error
from relax_core.tensor_files.whole_folder import new_folder, replace_folder
from relax_core.trainer_kit.ranks import Ranks
from relax_core.trainer_kit.shards import Piece, Stored, file_name, stored, write

SCHEMA = 2
STATE = "state.json"
WEIGHTS, MOMENTS = "model.", "optimizer."
"""Prefixes of the names of weights and of optimizer moments in the files."""
FIELD = "checkpoint"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a rank's part of a checkpoint, so that training continues while the copy is written."""

    pieces: Mapping[str, Piece]
    state: str
    """Text of `state.json` on the first rank, else empty."""
    rank: int

    @classmethod
    def of(cls, pieces: Mapping[str, Piece], state: Mapping[str, Any], ranks: Ranks) -> Self:
        """Make the snapshot of a rank's pieces; `state` is JSON data of the first rank."""
        whole = {"schema": SCHEMA, "ranks": ranks.size, "random": random_state(), **state}
        return cls(pieces, json.dumps(whole) if ranks.first else "", ranks.rank)

    def write(self, directory: Path) -> None:
        """Write the rank's files and flush them to disk. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        write(self.pieces, directory / file_name(self.rank))
        if self.state:
            with (directory / STATE).open("w", encoding="utf-8") as file:
                file.write(self.state)
                file.flush()
                os.fsync(file.fileno())


def look(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the saved `state.json` and a description of every tensor; raise ConfigError if a file is missing."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state.get("schema") != SCHEMA:
            raise ConfigError(
                FIELD, path, f"the schema is {state.get('schema')}, not {SCHEMA}; use the relax version that wrote it"
            )
        missing = [name for name in map(file_name, range(state["ranks"])) if not (path / name).is_file()]
        if missing:
            raise ConfigError(FIELD, path, f"the folder lacks {', '.join(missing[:3])}; resume from a whole one")
        return state, stored(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(FIELD, path, f"files can't be read ({error}); resume from another checkpoint") from error


def check_architecture(directory: str, found: Mapping[str, Stored], want: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError unless the saved weights have the names and shapes `want`."""
    have = {name.removeprefix(WEIGHTS): one.shape for name, one in found.items() if name.startswith(WEIGHTS)}
    if have != want:
        differing = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
        raise ConfigError(
            FIELD, directory, f"saved from another architecture ({', '.join(differing[:3])} differ); use that model"
        )


def check_base(directory: str, saved: str, base: str) -> None:
    """Raise ConfigError unless a checkpoint has adapters to the model `base`, or both are empty: no adapters.

    `saved` and `base` are fingerprints of models below adapters.
    """
    if saved == base:
        return
    if not (saved and base):
        has, needs = ("adapters", "no [model.lora]") if saved else ("a whole model", "[model.lora]")
        raise ConfigError(
            FIELD, directory, f"saved with {has}, but this run has {needs}; set [model.lora] as when it was saved"
        )
    fix = f"its adapters belong to model {saved}, but model.path holds {base}; set model.path to model {saved}"
    raise ConfigError(FIELD, directory, fix)


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
    failed: list[Any] = next((one for one in ranks.tell(said) if one), [])
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


def random_state() -> dict[str, object]:
    """Return the global random states of Python, numpy and torch as JSON data, so that a checkpoint needs no pickle."""
    version, keys, gauss = random.getstate()
    name, numpy_keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(keys), gauss],
        "numpy": [name, np.asarray(numpy_keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(numpy_keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
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
