# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that let vLLM's seeing models be imported where there is no CUDA, for development and tests.

Their modules import torchvision, whose wheels are linked against CUDA, to read pictures; this engine is given media that are
processed already. None of them computes anything, whoever calls one is told, and they are there only while `imported` runs.
They are refused where there is a GPU. `tests/test_cpu_stand_ins.py` fails when vLLM no longer needs them.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NoReturn

from relax_core.api.errors import InfrastructureError

_HOLLOW = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def imported(module: str, gpu: bool) -> Any:
    """A module of vLLM's that reads pictures."""
    if gpu or find_spec("torchvision") is not None:
        return importlib.import_module(module)
    with stand_ins(gpu):
        return importlib.import_module(module)


@contextmanager
def stand_ins(gpu: bool) -> Iterator[None]:
    """A torchvision without contents; InfrastructureError where there is a GPU."""
    import torch
    from transformers.utils import is_torchvision_available

    if gpu or torch.cuda.is_available():
        raise InfrastructureError("stand-ins for a CPU on a machine with a GPU: install torchvision there")
    is_torchvision_available()  # its answer is kept, and must be that there is none
    sys.modules.update({name: _hollow(name) for name in _HOLLOW})
    for name in _HOLLOW[1:]:
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, sys.modules[name])
    try:
        yield
    finally:
        for name in _HOLLOW:
            del sys.modules[name]


def _hollow(name: str) -> types.ModuleType:
    """A module from which any function can be imported and none can be called."""

    def missing(attribute: str) -> Callable[..., NoReturn]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def call(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{name}.{attribute}: torchvision is not installed in this interpreter")

        return call

    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__getattr__ = missing  # type: ignore[method-assign]
    return module
