# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed optimizer for the `[optimizer]` table: gradients summed, rescaled and clipped, and its state.

The state of a parameter (float32 weight and moments) is split over the ranks that hold the same parameter. `whole` joins
it in the shape of the parameter and `restore` splits it again, so a checkpoint does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor
from torch.nn import Parameter

from relax_core.api import OptimizerSpec
from relax_core.trainer_kit.offload import Offload

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT, STEP = "weight", "step"


class Optimizer:
    """AdamW over the parameters of one rank; weight decay excludes vectors, as in the `torch` trainer."""

    def __init__(
        self, models: Sequence[DistributedDataParallel], spec: OptimizerSpec, dtype: torch.dtype,
        offload: Offload | None = None,
    ) -> None:  # fmt: skip
        """`offload`: keeps the state in host memory except within `loaded`, from the first time that it ends."""
        config = OptimizerConfig(
            optimizer="adam", lr=spec.lr, adam_beta1=spec.betas[0], adam_beta2=spec.betas[1], adam_eps=1e-8,
            weight_decay=spec.weight_decay, clip_grad=spec.grad_clip, bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16, params_dtype=dtype, use_distributed_optimizer=True,
            loss_scale=1.0 if dtype == torch.float16 else None,  # the rank scales losses itself
        )  # fmt: skip
        self._models, self._clip, self._weight_decay = list(models), spec.grad_clip, spec.weight_decay
        self._optimizer = get_megatron_optimizer(config, self._models)
        self._offload = offload
        chained = isinstance(self._optimizer, ChainedOptimizer)
        self._parts: list[Any] = self._optimizer.chained_optimizers if chained else [self._optimizer]
        self._shards: dict[Parameter, Tensor] = {
            parameter: shard
            for part in self._parts
            for models, shards in (
                (part.model_fp32_groups, part.shard_fp32_groups),
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            )
            for parameter, shard in zip(chain(*models), chain(*shards), strict=True)
        }
        """This rank's range of the float32 weight of each parameter, which the inner optimizer steps."""

    def clear_gradient(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def finish_gradient(self, factor: float) -> float:
        """Sum the gradients over the ranks, multiply them by `factor`, clip; return the norm before clipping."""
        finalize_model_grads(self._models)
        if factor != 1.0:
            for model in self._models:
                model.scale_gradients(factor)
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if self._clip > 0:
            for part in self._parts:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self._clip, norm)
        return norm

    def advance(self, lr: float) -> None:
        """Apply one step at this learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._weight_decay * group["wd_mult"]  # 0 for vectors
        with self.loaded():
            self._optimizer.step_with_ready_grads()

    # -- state ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Keep the state on the device while the context is open; `whole` and `restore` need it there."""
        if self._offload is None:
            yield
            return
        self._offload.back()
        try:
            yield
        finally:
            self._offload.away(self._apart())

    def _apart(self) -> Iterator[Tensor]:
        """Yield the moments, and the float32 weights of 16-bit parameters."""
        for part in self._parts:
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
            for group in part.shard_fp32_from_float16_groups:
                yield from (weight for weight in group if weight is not None)

    def whole(self, parameter: Parameter) -> dict[str, Tensor]:
        """Return the float32 weight and moments in the shape of the parameter; moments only after a first step.

        All ranks that hold the parameter must call.
        """
        part, start, stop = self._own(parameter)
        own = self._shards.get(parameter)
        state = part.optimizer.state.get(own, {}) if own is not None else {}
        stepped = torch.tensor(float(state.get(STEP, 0.0)))
        dist.all_reduce(stepped, op=dist.ReduceOp.MAX, group=part.data_parallel_group)
        found = {WEIGHT: parameter.detach().float()} if parameter.dtype == torch.float32 else {}
        split = {} if found else {WEIGHT: own}
        if stepped:
            split |= {name: state.get(name) for name in MOMENTS}
            found[STEP] = stepped
        for name, value in split.items():
            flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if value is not None:
                flat[start:stop] = value.detach().float().reshape(-1)
            dist.all_reduce(flat, group=part.data_parallel_group)
            found[name] = flat.view_as(parameter)
        return found

    @torch.no_grad()
    def restore(self, parameter: Parameter, whole: Mapping[str, Tensor]) -> None:
        """Set the weight, and its moments if there are any, from tensors in the shape of the parameter."""
        parameter.copy_(whole[WEIGHT])
        part, start, stop = self._own(parameter)
        own = self._shards.get(parameter)
        if own is None:
            return
        if parameter.dtype != torch.float32:
            own.copy_(whole[WEIGHT].reshape(-1)[start:stop])
        state = part.optimizer.state
        state.pop(own, None)
        if STEP in whole:
            moments = {name: whole[name].reshape(-1)[start:stop].to(own.device).clone() for name in MOMENTS}
            state[own] = {STEP: whole[STEP].clone(), **moments}

    def _own(self, parameter: Parameter) -> tuple[Any, int, int]:
        """Return the optimizer of a parameter, and this rank's range of its flat values; empty if it has none."""
        part = next(one for one in self._parts if any(parameter in buffer.param_index_map for buffer in one.buffers))
        if parameter not in part.model_param_gbuf_map:
            return part, 0, 0
        own = part._get_model_param_range_map(parameter)["param"]
        return part, own.start, own.end
