# SPDX-License-Identifier: Apache-2.0
"""Weights in parts: every rank holds a share of each tensor, and a block's are whole only while it computes (FSDP2).

Also the way between a share and the whole, for those who publish, save and load. It decides nothing about what is
computed: `Root` runs any function that reads the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from relax_plugin_torch.blocks import blocks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

Sharding = Literal["auto", "none", "fsdp"]
STATE_BYTES = 16
"""Of one parameter: weight, gradient and two moments in float32."""

Scores = dict[str, Tensor]


def suits(model: nn.Module, device: torch.device) -> bool:
    """Tell whether `auto` shards: where whole copies of all state would take half of a GPU."""
    if device.type != "cuda":
        return False
    state = STATE_BYTES * sum(parameter.numel() for parameter in model.parameters())
    return state > torch.cuda.get_device_properties(device).total_memory / 2


class Root(nn.Module):
    """The one module that ranks enter: embedding and head are whole from here on, whatever reads them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Scores]) -> Scores:
        return work()


def shard(
    model: PreTrainedModel, device: torch.device, size: int, among: DeviceMesh | None = None,
    aside: Sequence[nn.Module] = (),
) -> Root:  # fmt: skip
    """Share out the model's tensors, block by block. Gradients arrive summed over the ranks, not averaged. `among`: the
    ranks that have the same part of it; absent: all of them. `aside`: what every rank keeps whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    root, mesh = Root(model), among or init_device_mesh(device.type, (size,))
    kept = {part for module in aside for part in module.modules()}
    for block in blocks_of(model):
        if block not in kept:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    whole_here = {parameter for module in aside for parameter in module.parameters()}
    fully_shard(root, mesh=mesh, reshard_after_forward=True, ignored_params=whole_here)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def shared_out(tensor: Tensor) -> bool:
    """Tell whether ranks hold shares of it."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's share."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank; where it is shared out, all ranks call."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_like(own: Tensor, value: Tensor) -> Tensor:
    """Return the part of a whole `value` that belongs where `own` is; every rank has the value, so nothing travels."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor) or value.shape != own.shape:
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def gathered(tensors: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Whole tensors by name; those that were shared out lie in host memory, one at a time on the device.

    All ranks call, with the same tensors in the same order; who does not `keep` gets nothing.
    """
    kept = {}
    for name, tensor in tensors.items():
        one = whole(tensor)
        if keep:
            kept[name] = one if one is tensor else one.cpu()
    return kept


def alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors that one operation can take together: those that are shared out over the same ranks."""
    from torch.distributed.tensor import DTensor

    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.device_mesh, len(tensor.placements)) if isinstance(tensor, DTensor) else None
        groups.setdefault(key, []).append(index)
    return list(groups.values())
