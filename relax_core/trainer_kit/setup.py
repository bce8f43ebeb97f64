# SPDX-License-Identifier: Apache-2.0
"""Checks and choices of a trainer before it loads a model: roles, outputs, threads, determinism, device and formats."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from relax_core.api import Algorithm, ConfigError, TrainerSpec

TRAINED_ROLES = ("actor", "critic")
ROLES = (*TRAINED_ROLES, "reference", "actor_fwd", "teacher")
HEAD_OUTPUTS = frozenset({"log_probs", "entropy", "top_k", "log_probs_at"})
"""Outputs that a language model's head can compute."""
SCALARS = frozenset({"values", "rewards"})
"""Outputs of a scalar head: a critic's `values` [tokens], and a reward model's `rewards` [rows]."""
SCALAR_HEAD = "score.weight"
"""Name of the scalar head's weight [1, width] in a Hugging Face folder."""


def scalars(spec: TrainerSpec, build: Callable[..., Algorithm]) -> frozenset[str]:
    """Return the scalar outputs that the model needs in this role; empty if it keeps its language-model head."""
    if spec.role == "critic":
        return frozenset({"values"})
    if spec.role != "actor":
        return frozenset()
    return SCALARS & {output.name for output in build(spec.algorithm).outputs()}


def check_spec(spec: TrainerSpec, trainer: str) -> None:
    """Raise ConfigError for a role or a temperature that this trainer does not support."""
    if spec.role not in ROLES:
        raise ConfigError(
            "trainer.name", f"{trainer} for role {spec.role}", f"it supports the roles {', '.join(ROLES)}"
        )
    if spec.temperature <= 0:
        raise ConfigError("rollout.temperature", spec.temperature, "set a value above 0: log-probs divide by it")


def check_outputs(algorithm: Algorithm, role: str = "actor") -> None:
    """Raise ConfigError for an algorithm that this trainer can't run in a role.

    The actor's algorithm may need outputs of the language model's head (`HEAD_OUTPUTS`), or `rewards` alone, which a
    scalar head computes. A critic needs an algorithm that has a critic's loss.
    """
    name, wanted = type(algorithm).__name__, {output.name for output in algorithm.outputs()}
    if role != "actor":
        if role not in algorithm.fits:
            raise ConfigError("algorithm.name", name, f"this algorithm has no loss for a {role}; choose ppo")
        return
    if wanted != {"rewards"} and (beyond := sorted(wanted - HEAD_OUTPUTS)):
        able = f"the trainer computes {', '.join(sorted(HEAD_OUTPUTS))}, or rewards alone"
        raise ConfigError("algorithm.name", name, f"the algorithm needs {', '.join(beyond)}; {able}")


def set_up(spec: TrainerSpec) -> Callable[[], None]:
    """Set the threads and the determinism of this process; return a function that restores the former determinism."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))
    if not spec.deterministic:
        return lambda: None
    before = torch.are_deterministic_algorithms_enabled()
    # cuBLAS reads this variable once, when it makes its first handle
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(before)


def choose_device(wanted: str, rank: int = 0) -> torch.device:
    """Return the device of a rank: `wanted`, or for `auto` a GPU if torch sees any.

    Ranks that see all GPUs of a machine take different ones; a rank that sees a single GPU takes it. Raises ConfigError
    for `cuda` without a GPU.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("trainer.device", wanted, "torch sees no GPU on this machine; use cpu or auto")
    if not available or wanted == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_format(name: Any, device: torch.device) -> torch.dtype:
    """Return the format that `model.dtype` names. Raises ConfigError if this device can't compute in it."""
    if name not in FORMATS:
        raise ConfigError("model.dtype", repr(name), f"the trainer computes in {', '.join(FORMATS)}")
    lacking = bfloat16_lacks(device) if name == "bfloat16" else ""
    if lacking:
        raise ConfigError("model.dtype", repr(name), f"{lacking} does not compute in bfloat16; use float16 or float32")
    return FORMATS[name]


def publish_format(spec: TrainerSpec, computes: torch.dtype) -> torch.dtype:
    """Return the format of weights sent to engines. Raises ConfigError if the trainer can't publish in it."""
    name = spec.publish_dtype
    if name and name not in FORMATS:
        raise ConfigError("rollout.dtype", repr(name), f"the trainer publishes {', '.join(FORMATS)}")
    return FORMATS[name] if name else computes


def bfloat16_lacks(device: torch.device) -> str:
    """Return the GPU's name if it only emulates bfloat16, which is slow; empty for any other device."""
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return torch.cuda.get_device_name(device)
