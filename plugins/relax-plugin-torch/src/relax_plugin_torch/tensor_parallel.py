# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: consecutive ranks compute the same rows; each rank has some heads and some columns of the MLP.

The model's own plan (transformers' `tp_plan`) says how each matrix is split; torch's DTensor carries it out. Embedding
and head stay whole, so every rank of a group has all logits of its tokens, and log-probs need no communication.
Weights that a rank applies to its own heads only (norms of queries and keys) get partial gradients, which are summed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from relax_core.api import ConfigError, TrainerSpec
from relax_plugin_torch.sharding import local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

FIELD = "trainer.tensor_parallel"
WHOLE = frozenset({"embedding_rowwise", "embedding_colwise", "colwise_gather_output", "colwise_rep"})
"""Styles in a plan for embeddings and heads, which this trainer keeps whole."""
PARTIAL = "replicated_with_grad_allreduce"


@dataclass(slots=True)
class TensorParallelGroup:
    """The ranks that compute the same rows, as one rank sees them; a group of one rank does nothing."""

    size: int = 1
    rank: int = 0
    """This rank's index within the group."""
    mesh: DeviceMesh | None = None
    """Mesh of all ranks, [data, tensor]; None for a group of one rank."""
    partial: list[nn.Module] = field(default_factory=list)
    """Modules with partial gradients; modules rather than parameters, because sharding replaces parameters."""

    @classmethod
    def of(cls, rank: int, ranks: int, size: int, device: torch.device) -> TensorParallelGroup:
        if size == 1:
            return cls()
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("data", "tensor"))
        return cls(size, rank % size, mesh)

    @property
    def first(self) -> bool:
        """True on the rank that reports results for its group."""
        return self.rank == 0

    @property
    def data(self) -> DeviceMesh | None:
        """Mesh of the ranks that hold the same part as this rank, one from each group; None for groups of one rank."""
        return None if self.mesh is None else self.mesh["data"]

    def cut(self, model: PreTrainedModel) -> None:
        """Split the matrices that the model's plan names, so that every rank of the group holds its part."""
        if self.mesh is None:
            return
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        for module, style in planned(model):
            if style == PARTIAL:
                self.partial.append(module)
            elif style not in WHOLE:
                parallelize_module(module, self.mesh["tensor"], styles[style]())

    def add_up_partial(self) -> None:
        """Sum partial gradients over the ranks of the group."""
        if self.mesh is None:
            return
        for parameter in (parameter for module in self.partial for parameter in module.parameters()):
            if parameter.grad is not None:
                dist.all_reduce(local(parameter.grad), group=self.mesh.get_group("tensor"))


def check_tensor_parallel(model: PreTrainedModel, ranks: int, size: int, adapters: bool) -> None:
    """Raise ConfigError, before ranks connect, for a model that can't be split over `size` ranks."""
    if size == 1:
        return
    check_divides(ranks, size)
    if adapters:
        raise ConfigError(FIELD, str(size), "adapters need whole matrices; remove this option or model.lora")
    check_heads(model, size)
    list(planned(model))


def check_divides(ranks: int, size: int) -> None:
    if ranks % size:
        fix = f"it must divide the ranks; set placement.actor.ranks to a multiple of {size}, {FIELD} to a divisor of {ranks}"
        raise ConfigError(FIELD, f"{size} with {ranks} ranks", fix)


def check_heads(model: PreTrainedModel, size: int) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % size:
            fix = f"the model's {name} is {number}; use a divisor of it"
            raise ConfigError(FIELD, str(size), fix)


def planned(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules with their style in the model's plan. Raises ConfigError if this trainer can't apply the plan."""
    plan, name = dict(getattr(model, "_tp_plan", None) or {}), type(model).__name__
    if not set(plan.values()) & {"colwise", "rowwise"}:
        raise ConfigError(FIELD, f"set for {name}", "transformers has no plan for this model; leave it out")
    if strange := sorted(set(plan.values()) - WHOLE - {"colwise", "rowwise", PARTIAL}):
        fix = f"its plan has {', '.join(strange)}, which the torch trainer does not support; leave it out"
        raise ConfigError(FIELD, f"set for {name}", fix)
    for path, module in model.named_modules():
        style = plan.get(re.sub(r"\d+", "*", path))
        if style is not None:
            yield module, style


def check_media(spec: TrainerSpec, group_size: int) -> None:
    """Raise ConfigError for media with tensor parallelism: no model's plan splits its vision and audio modules."""
    if spec.media and group_size > 1:
        raise ConfigError(
            "trainer.tensor_parallel", f"{group_size} with media", 'set it to 1; sharding = "fsdp" supports media'
        )
