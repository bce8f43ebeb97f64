# SPDX-License-Identifier: Apache-2.0
"""This rank's pieces of whole and sharded tensors, copied to host memory for a checkpoint (`trainer_kit.shards`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from relax_core.trainer_kit.shards import Piece, to_host


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
        return Piece(to_host(tensor), (0,) * tensor.dim()) if first else None
    mesh, placements = tensor.device_mesh, tensor.placements
    place = mesh.get_coordinate()
    copies = any(isinstance(one, Replicate) and place[dim] for dim, one in enumerate(placements)) if place else True
    values = tensor.to_local()
    if copies or not values.numel():
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Piece(to_host(values), tuple(offsets))
