# SPDX-License-Identifier: Apache-2.0
"""Makes megatron-core compute on a CPU, for tests on machines without GPU: importing this module patches torch.

megatron-core asks for the device "cuda" in many places and has no setting against it. The patches replace such a device
by the CPU, and CUDA's streams by nothing. Where torch sees a GPU, importing raises RuntimeError.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "eye", "empty_like",
             "zeros_like", "ones_like", "full_like", "linspace")  # fmt: skip


class NoStream:
    """A stream of a device that computes at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def wait_event(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: object) -> NoStream:
        return self


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, **named: Any) -> Any:
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        named.pop("pin_memory", None)
        return make(*args, **named)

    return call


def apply() -> None:
    """Patch torch and megatron-core in this process. Raises RuntimeError where torch sees a GPU."""
    if torch.cuda.is_available():
        raise RuntimeError("megatron_on_cpu: torch sees a GPU; megatron-core needs no patches here")
    if getattr(torch, "_megatron_on_cpu", False):
        return
    torch._megatron_on_cpu = True
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self
    named_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **named: Any) -> Any:
        """Return the name of CUDA's tensor type, with which the optimizers compare."""
        if args or named:
            return named_type(self, *args, **named)
        return named_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name
    cuda, cpu = torch.cuda, torch.device("cpu")
    for name, value in {
        "current_device": lambda: cpu, "synchronize": lambda *_: None, "Stream": NoStream,
        "Event": NoStream, "current_stream": lambda *_: NoStream(),
        "default_stream": lambda *_: NoStream(), "stream": lambda *_: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed, "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }.items():  # fmt: skip
        setattr(cuda, name, value)
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
