# SPDX-License-Identifier: Apache-2.0
"""Files of tensor shards, one for each rank, in the safetensors format of torch's distributed checkpoints.

Every piece carries its offsets in the whole tensor, so any number of ranks can read the files
(`HuggingFaceStorageReader`), without pickle. Tensors are copied before they are written, and writing releases Python's
lock, so training continues meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from relax_core.trainer_kit.model_folder import SAFETENSORS

PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Metadata keys of torch (torch.distributed.checkpoint._hf_utils)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tensor: its values in host memory, and its offset in the whole tensor along each axis."""

    values: Tensor
    offsets: tuple[int, ...]


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


# -- write ------------------------------------------------------------------------------------------------------------


def file_name(rank: int) -> str:
    """Return the name that torch gives the file of a rank."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write(pieces: Mapping[str, Piece], path: Path) -> None:
    """Write pieces to a file, and flush it to disk. Raises OSError."""
    header, end = _header(pieces)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for piece in pieces.values():
            if piece.values.numel():
                file.write(piece.values.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
        if file.tell() != 8 + len(header) + end:
            raise OSError(f"{path.name} has {file.tell()} bytes instead of {8 + len(header) + end}")


def _header(pieces: Mapping[str, Piece]) -> tuple[bytes, int]:
    """Return the JSON header, padded so that tensors are aligned, and the size of all tensors in bytes."""
    places = {name: {OFFSETS: list(piece.offsets)} for name, piece in pieces.items()}
    entries: dict[str, object] = {"__metadata__": {PLACES: json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}}
    end = 0
    for name, piece in pieces.items():
        size = piece.values.numel() * piece.values.element_size()
        entries[name] = {
            "dtype": SAFETENSORS[piece.values.dtype], "shape": list(piece.values.shape), "data_offsets": [end, end + size],
        }  # fmt: skip
        end += size
    header = json.dumps(entries).encode()
    return header + b" " * (-len(header) % 8), end


# -- read -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """Shape and dtype of a whole tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def stored(directory: Path) -> dict[str, Stored]:
    """Return a checkpoint's tensors by name. Raises OSError or SafetensorError for files that can't be read."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    known: Mapping[str, Any] = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: Stored(tuple(one.size), one.properties.dtype) for name, one in known.items()}


def read_into(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Fill tensors, whole or sharded, with their saved values. Ranks read independently, without communication."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # every rank reads for itself
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)


class PieceReader:
    """Reads any part of the tensors of a checkpoint from the pieces that hold it."""

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises OSError or SafetensorError for files that can't be read."""
        self._files: list[Any] = [safe_open(path, "pt") for path in sorted(directory.glob("*.safetensors"))]
        self._places: dict[str, list[tuple[int, Sequence[int]]]] = {}
        for number, file in enumerate(self._files):
            for name, place in json.loads(file.metadata()[PLACES]).items():
                self._places.setdefault(name, []).append((number, place[OFFSETS]))

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str, index: Sequence[slice]) -> Tensor:
        """Return the part `index` of a tensor. Raises KeyError for a name, ValueError for values that no piece holds."""
        part: Tensor | None = None
        filled = 0
        for number, offsets in self._places[name]:
            piece = self._files[number].get_slice(name)
            ends = [start + length for start, length in zip(offsets, piece.get_shape(), strict=True)]
            both = [
                slice(max(own.start, at), min(own.stop, end)) for own, at, end in zip(index, offsets, ends, strict=True)
            ]
            if any(one.stop <= one.start for one in both):
                continue
            values = piece[tuple(slice(one.start - at, one.stop - at) for one, at in zip(both, offsets, strict=True))]
            if part is None:
                part = values.new_zeros([own.stop - own.start for own in index])
            part[
                tuple(slice(one.start - own.start, one.stop - own.start) for one, own in zip(both, index, strict=True))
            ] = values
            filled += values.numel()
        size = math.prod(own.stop - own.start for own in index)
        if part is None or filled != size:
            raise ValueError(f"{name}: the files hold {filled} of {size} values; resume from another checkpoint")
        return part
