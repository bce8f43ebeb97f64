# SPDX-License-Identifier: Apache-2.0
"""Environment variables that must be set before vLLM is imported, and the facts of this machine that decide about them.
Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from relax_core.api.errors import ConfigError

ALWAYS: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its core runs in the engine's own process: weights change between two tokens
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
ON_CPU: Mapping[str, str] = {
    "TORCHDYNAMO_DISABLE": "1",  # a sampling helper would compile for half a minute at the first request
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def on_gpu() -> bool:
    """Tell whether this machine has NVIDIA GPUs, by their device files."""
    return Path("/dev/nvidiactl").exists()


def prepare() -> None:
    """Set what is not set; ConfigError where vLLM is not installed in this interpreter."""
    if find_spec("vllm") is None:
        fix = "point engine.python to an interpreter that has it, or pip install 'relax-plugin-vllm[vllm]' (docs/engines.md)"
        raise ConfigError("engine.name", "vllm, which this interpreter does not have", fix)
    for name, value in {**ALWAYS, **({} if on_gpu() else ON_CPU)}.items():
        os.environ.setdefault(name, value)
