# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch and torchao for the `[optimizer]` table. Weight decay excludes vectors (norms, biases).

Bytes of state per parameter: adamw 8, adamw-8bit 2, sgd 4, adafactor almost none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relax_core.api import ConfigError, OptimizerSpec
from relax_plugin_torch.options import OptimizerKind
from relax_plugin_torch.sharding import alike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELD = "trainer.optimizer"
LOW_BIT = "pip install 'relax-plugin-torch[low-bit]'"
WHOLE = ("adamw-8bit", "adafactor")
"""Optimizers whose state can't be sharded: adamw-8bit quantizes in blocks, adafactor keeps row and column sums."""


def make_optimizer(model: PreTrainedModel, spec: OptimizerSpec, kind: OptimizerKind = "adamw") -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [trained[index] for index in part if (trained[index].dim() >= 2) is decays],
         "weight_decay": spec.weight_decay if decays else 0.0}
        for part in alike(trained)
        for decays in (True, False)
    ]  # fmt: skip
    return _made(kind, [group for group in groups if group["params"]], spec)


def _made(kind: OptimizerKind, groups: list[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, fused=True)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.betas[0], fused=True)
    if kind == "adafactor":
        default = OptimizerSpec(spec.lr).betas
        if tuple(spec.betas) != default:
            fix = f"adafactor has no betas: set the default {list(default)}, or another trainer.optimizer"
            raise ConfigError("optimizer.betas", list(spec.betas), fix)
        return torch.optim.Adafactor(groups, lr=spec.lr)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(FIELD, repr(kind), f"torchao is not installed: {LOW_BIT}") from error
    made: torch.optim.Optimizer = AdamW8bit(groups, lr=spec.lr, betas=spec.betas)
    return made


def check_whole(kind: OptimizerKind, shared_out: bool) -> None:
    """Raise ConfigError for sharded weights with an optimizer whose state can't be sharded."""
    if shared_out and kind in WHOLE:
        fix = "its state needs whole tensors; set trainer.sharding = none, or choose adamw or sgd"
        raise ConfigError(FIELD, f"{kind} on sharded weights", fix)


def advance(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Apply one optimizer step at this learning rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    with _uncompiled(optimizer):
        optimizer.step()


def _uncompiled(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Return a context that keeps torchao from compiling each shape on a CPU, which takes minutes and saves nothing."""
    on_gpu = optimizer.param_groups[0]["params"][0].is_cuda
    if on_gpu or not type(optimizer).__module__.startswith("torchao."):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that the optimizer's state takes."""
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(part.nbytes for value in values for part in parts(value).values())


def parts(value: Any) -> dict[str, Tensor]:
    """Return a state value as plain tensors by name: the parts of an 8-bit tensor, or the value under ""."""
    if isinstance(value, Tensor) and type(value).__module__.startswith("torchao."):
        return {name: getattr(value, name) for name in value.tensor_attrs}
    return {"": torch.as_tensor(value)}


def joined(plain: dict[str, Tensor], moment: str) -> Tensor:
    """Undo `parts`: return the state value of a moment from its plain tensors."""
    if "" in plain:
        return plain[""]
    from torchao.optim.subclass_8bit import OptimState8bit

    signed = moment == "exp_avg"
    whole: Tensor = OptimState8bit(plain["codes"], plain["scale"], plain["qmap"], signed, torch.float32)
    return whole
