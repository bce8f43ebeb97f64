# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a child process sees: those of the plan's devices that are its own, as this process numbers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(
    devices: Sequence[str], environment: Mapping[str, str], nodes: Path = Path("/dev")
) -> dict[str, str]:
    """Its environment. A process that the plan puts on a CPU sees no GPU; one without devices sees what this one does.

    A plan of more GPUs than there are goes round them again (its notes say so): processes share one without turns.
    """
    if not devices:
        return {}
    numbers = [int(name.removeprefix("gpu:")) for name in devices if name.startswith("gpu:")]
    seen = seen_gpus(environment, nodes)
    return {VISIBLE: ",".join(seen[number % len(seen)] if seen else str(number) for number in numbers)}


def seen_gpus(environment: Mapping[str, str], nodes: Path = Path("/dev")) -> list[str]:
    """What a process with this environment sees, by the names that CUDA takes."""
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(nodes.glob("nvidia[0-9]*"))))]
