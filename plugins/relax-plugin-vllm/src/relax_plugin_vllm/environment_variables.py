# SPDX-License-Identifier: Apache-2.0
"""Environment variables that must be set before vLLM is imported. This module does not import torch or vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from relax_core.api.errors import ConfigError

ALWAYS: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core runs in this process, so that weights change between two tokens
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the newer runner keeps its requests elsewhere, so draws could not be seeded
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
ON_CPU: Mapping[str, str] = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles a sampling helper for half a minute
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def on_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU, recognised by the driver's device file."""
    return Path("/dev/nvidiactl").exists()


def prepare() -> None:
    """Set the variables that are not yet set. Raises ConfigError if this interpreter does not have vLLM."""
    if find_spec("vllm") is None:
        fix = "set engine.python to an interpreter with it, or pip install 'relax-plugin-vllm[vllm]' (docs/engines.md)"
        raise ConfigError("engine.name", "vllm, which this interpreter does not have", fix)
    for name, value in {**ALWAYS, **({} if on_gpu() else ON_CPU)}.items():
        os.environ.setdefault(name, value)
