# SPDX-License-Identifier: Apache-2.0
"""Files of tensor shards, one for each rank, in the safetensors format of torch's distributed checkpoints.

Every piece carries its offsets in the whole tensor, so any number of ranks can read the files
(`HuggingFaceStorageReader`), without pickle. Tensors are copied before they are written, and writing releases Python's
lock, so training continues meanwhile.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from relax_plugin_torch.model import SAFETENSORS

PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Metadata keys of torch (torch.distributed.checkpoint._hf_utils)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tensor: its values in host memory, and its offset in the whole tensor along each axis."""

    values: Tensor
    offsets: tuple[int, ...]


def copied(tensors: Mapping[str, Tensor], first: bool) -> dict[str, Piece]:
    """Return this rank's pieces, copied to host memory. Only the first rank copies tensors that every rank has whole."""
    pieces = {}
    for name, tensor in tensors.items():
        piece = _piece(tensor, first)
        if piece is not None:
            pieces[name] = piece
    return pieces


def _piece(tensor: Tensor, first: bool) -> Piece | None:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return Piece(_to_host(tensor), (0,) * tensor.dim()) if first else None
    mesh, placements = tensor.device_mesh, tensor.placements
    place = mesh.get_coordinate()
    copies = any(isinstance(one, Replicate) and place[dim] for dim, one in enumerate(placements)) if place else True
    values = tensor.to_local()
    if copies or not values.numel():
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Piece(_to_host(values), tuple(offsets))


def _to_host(tensor: Tensor) -> Tensor:
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
                file.write(memoryview(piece.values.reshape(-1).view(torch.uint8).numpy()))
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
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    known = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: Stored(tuple(one.size), one.properties.dtype) for name, one in known.items()}


def read_into(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Fill tensors, whole or sharded, with their saved values. Ranks read independently, without communication."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # every rank reads for itself
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)
