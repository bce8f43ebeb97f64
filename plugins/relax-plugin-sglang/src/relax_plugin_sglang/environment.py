# SPDX-License-Identifier: Apache-2.0
"""Environment variables that must be set before SGLang is imported, and the facts of this machine that decide about
them. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from relax_core.api.errors import ConfigError

ALWAYS: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # it keeps a few positions for itself; none past the model's is reached
}
ON_CPU: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # small helpers would compile for half a minute at the first request
}


def on_gpu() -> bool:
    """Tell whether this machine has NVIDIA GPUs, by their device files."""
    return Path("/dev/nvidiactl").exists()


def prepare() -> None:
    """Set what is not set; ConfigError where SGLang is not installed in this interpreter."""
    if find_spec("sglang") is None:
        fix = (
            "point engine.python to an interpreter that has it, or pip install 'relax-plugin-sglang[sglang]' "
            "(docs/engines.md)"
        )
        raise ConfigError("engine.name", "sglang, which this interpreter does not have", fix)
    for name, value in {**ALWAYS, **({} if on_gpu() else ON_CPU)}.items():
        os.environ.setdefault(name, value)
