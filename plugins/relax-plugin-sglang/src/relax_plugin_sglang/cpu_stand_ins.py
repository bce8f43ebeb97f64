# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that let SGLang be imported and run where there is no CUDA, for development and tests.

They declare names that its modules look up at import; none of them computes anything, and whoever calls one is told. They
are refused where there is a GPU. `tests/test_cpu_stand_ins.py` fails when SGLang no longer needs them.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from relax_core.api.errors import InfrastructureError

DETECTION = ("nms", "qnms")
"""Operators of torchvision, whose wheels are linked against CUDA and then declare nothing."""
KERNELS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu",
)  # fmt: skip
"""Names of sgl_kernel, which has no build for CPUs."""
_declared: list[Any] = []
"""Objects that torch forgets when nobody holds them."""


def install(gpu: bool) -> None:
    """Once a process; InfrastructureError where there is a GPU."""
    import torch

    if gpu or torch.cuda.is_available():
        raise InfrastructureError("stand-ins for a CPU on a machine with a GPU: use SGLang's own packages there")
    if _declared:
        return
    _declare("torchvision", DETECTION, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declare("sgl_kernel", KERNELS, "(Tensor x) -> Tensor")
    for name in ("sgl_kernel", "sgl_kernel.mamba"):
        sys.modules.setdefault(name, _hollow(name))
    torch.cuda.cudart = _NoCuda  # type: ignore[assignment]


def _declare(library: str, names: tuple[str, ...], signature: str) -> None:
    import torch

    declared = torch.library.Library(library, "FRAGMENT")
    for name in names:
        if not hasattr(getattr(torch.ops, library), name):
            declared.define(f"{name}{signature}")
    _declared.append(declared)


class _NoCuda:
    """Pinning host memory: there is nothing to pin it for."""

    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
        return 0


def _hollow(name: str) -> types.ModuleType:
    """A module from which any function can be imported and none can be called."""

    def missing(attribute: str) -> Callable[..., NoReturn]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def call(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{name}.{attribute}: this machine has no GPU, and {name} no build for CPUs")

        return call

    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__getattr__ = missing  # type: ignore[method-assign]
    return module
