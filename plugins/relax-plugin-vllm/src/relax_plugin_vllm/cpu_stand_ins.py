# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for torchvision that let vLLM's vision models be imported without CUDA, for development and tests.

The modules of these models import torchvision to read images, but its wheels need CUDA, and this engine gets processed
media instead. The stand-ins compute nothing, and a call raises NotImplementedError. They exist only while `imported`
runs, and never on a machine with a GPU. `tests/test_cpu_stand_ins.py` fails when vLLM no longer needs them.
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
    """Import a module of vLLM that imports torchvision, with stand-ins if torchvision is missing."""
    if gpu or find_spec("torchvision") is not None:
        return importlib.import_module(module)
    with stand_ins(gpu):
        return importlib.import_module(module)


@contextmanager
def stand_ins(gpu: bool) -> Iterator[None]:
    """Install an empty torchvision while the context is open. Raises InfrastructureError on a machine with a GPU."""
    import torch
    from transformers.utils import is_torchvision_available

    if gpu or torch.cuda.is_available():
        raise InfrastructureError("got CPU stand-ins for torchvision on a machine with a GPU; install torchvision")
    is_torchvision_available()  # transformers keeps the answer, which must be False
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
    """Return a module from which any name can be imported; each name is a function that raises NotImplementedError."""

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
