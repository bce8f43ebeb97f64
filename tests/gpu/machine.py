# SPDX-License-Identifier: Apache-2.0
"""Facts of the machine and of what is installed, as one JSON document: `python -m tests.gpu.machine`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from typing import Any

SHOWN = re.compile(
    r"relax-.*|torch|torchao|triton|transformers|peft|safetensors|tokenizers|numpy|ray|megatron-core|flash-attn|vllm|sglang|"
    r"transformer-engine|nvidia-.*|cuda-.*"
)
"""Distributions whose versions may change a result on a GPU."""


def gpus() -> dict[str, Any]:
    """Return the GPUs that torch sees, the versions that torch was built for, and the driver's."""
    try:
        import torch
    except ImportError:
        return {"gpus": [], "torch": "", "lacking": "torch is not installed"}
    seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found: dict[str, Any] = {
        "gpus": [{"name": each.name, "memory_gib": round(each.total_memory / 2**30, 1)} for each in seen],
        "torch": str(torch.__version__), "cuda": torch.version.cuda or "", "driver": driver(),
    }  # fmt: skip
    if seen:
        capability = torch.cuda.get_device_capability(0)
        found |= {"capability": ".".join(map(str, capability)), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def driver() -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else ""


def versions() -> dict[str, str]:
    installed = {str(each.name).lower(): each.version for each in importlib.metadata.distributions()}
    return {name: installed[name] for name in sorted(installed) if SHOWN.fullmatch(name)}


def main() -> None:
    system = {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    print(json.dumps({"machine": {**gpus(), **system}, "packages": versions()}))


if __name__ == "__main__":
    main()
