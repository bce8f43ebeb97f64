# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for CUDA packages that let SGLang be imported and run without CUDA, for development and tests.

The stand-ins declare names that SGLang's modules look up at import, and compute nothing. On a machine with a GPU they
can't be installed. `tests/test_cpu_stand_ins.py` fails when SGLang no longer needs the stand-ins.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from relax_core.api.errors import InfrastructureError

DETECTION = ("nms", "qnms")
"""Operators of torchvision; its wheels need CUDA, and declare no operators without CUDA."""
KERNELS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu",
)  # fmt: skip
"""Operators of sgl_kernel, which has no build for CPUs."""
_declared: list[Any] = []
"""torch libraries, kept alive because torch drops a library's operators when the library object is freed."""


def install(gpu: bool) -> None:
    """Install the stand-ins, once per process. Raises InfrastructureError on a machine with a GPU."""
    import torch

    if gpu or torch.cuda.is_available():
        raise InfrastructureError("got CPU stand-ins for SGLang on a machine with a GPU; install SGLang's packages")
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
    """A stand-in for CUDA's pinning of host memory, which does nothing."""

    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
        return 0


def _hollow(name: str) -> types.ModuleType:
    """Return a module from which any name can be imported; each name is a function that raises NotImplementedError."""

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
