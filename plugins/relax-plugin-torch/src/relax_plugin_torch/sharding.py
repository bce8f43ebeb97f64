# SPDX-License-Identifier: Apache-2.0
"""Sharded weights (FSDP2): every rank holds a shard of each tensor; a block's tensors are whole only while it computes.

This module also converts between shards and whole tensors, for publishing, saving and loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from relax_plugin_torch.blocks import blocks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

Sharding = Literal["auto", "none", "fsdp"]
STATE_BYTES = 16
"""Bytes of one parameter's weight, gradient and two moments in float32."""

Scores = dict[str, Tensor]


def suits(model: nn.Module, device: torch.device) -> bool:
    """Return True if `auto` should shard: a whole copy of all state would take more than half of the GPU's memory."""
    if device.type != "cuda":
        return False
    state = STATE_BYTES * sum(parameter.numel() for parameter in model.parameters())
    return state > torch.cuda.get_device_properties(device).total_memory / 2


class Root(nn.Module):
    """The root module of FSDP: its forward pass runs any function of the model while embedding and head are whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Scores]) -> Scores:
        return work()


def shard(
    model: PreTrainedModel, device: torch.device, size: int, among: DeviceMesh | None = None,
    aside: Sequence[nn.Module] = (),
) -> Root:  # fmt: skip
    """Shard the model's tensors over the ranks, block by block. Gradients are summed over the ranks, not averaged.

    `among`: the ranks to shard over, which hold the same tensor-parallel part; None: all `size` ranks.
    `aside`: modules that every rank keeps whole.
    """
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
    """Return True if each rank holds only a shard of the tensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of the tensor, or the tensor itself if it is not sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank. All ranks must call if the tensor is sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_like(own: Tensor, value: Tensor) -> Tensor:
    """Return this rank's shard of `value`, sharded like `own`. Every rank passes the whole value; nothing is sent."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor) or value.shape != own.shape:
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def gathered(tensors: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Return whole tensors by name. Sharded tensors are gathered one at a time on the device and moved to host memory.

    All ranks must call with the same tensors in the same order. `keep`: False returns an empty dict on this rank.
    """
    kept = {}
    for name, tensor in tensors.items():
        one = whole(tensor)
        if keep:
            kept[name] = one if one is tensor else one.cpu()
    return kept


def alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return index groups of tensors that one torch operation accepts together: tensors sharded over the same ranks."""
    from torch.distributed.tensor import DTensor

    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.device_mesh, len(tensor.placements)) if isinstance(tensor, DTensor) else None
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def towers(model: Any) -> list[nn.Module]:
    """Return the vision and audio modules of the model.

    Sharding keeps these modules whole on every rank: a rank without media skips them, so gathering would never end.
    """
    base = model.base_model
    if not hasattr(base, "language_model"):
        return []
    return [module for name, module in base.named_children() if name != "language_model"]
