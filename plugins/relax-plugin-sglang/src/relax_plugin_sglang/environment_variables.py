# SPDX-License-Identifier: Apache-2.0
"""Environment variables that must be set before SGLang is imported. This module does not import torch or SGLang."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from relax_core.api.errors import ConfigError

ALWAYS: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for spare positions of SGLang that no token reaches
}
ON_CPU: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles small helpers for half a minute
}


def on_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU, recognised by the driver's device file."""
    return Path("/dev/nvidiactl").exists()


def prepare() -> None:
    """Set the variables that are not yet set. Raises ConfigError if this interpreter does not have SGLang."""
    if find_spec("sglang") is None:
        fix = (
            "set engine.python to an interpreter with it, or pip install 'relax-plugin-sglang[sglang]' "
            "(docs/engines.md)"
        )
        raise ConfigError("engine.name", "sglang, which this interpreter does not have", fix)
    for name, value in {**ALWAYS, **({} if on_gpu() else ON_CPU)}.items():
        os.environ.setdefault(name, value)
