# SPDX-License-Identifier: Apache-2.0
"""The steps before the model is loaded: checks that the spec can be served, threads, determinism, the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from relax_core.api import Algorithm, ConfigError, TrainerSpec

TRAINED_ROLES = ("actor", "critic")
ROLES = (*TRAINED_ROLES, "reference", "actor_fwd", "teacher")
HEAD_OUTPUTS = frozenset({"log_probs", "entropy", "top_k", "log_probs_at"})
"""What the model's own head gives."""


def check_spec(spec: TrainerSpec) -> None:
    """Refuse what this trainer does not do, in the words of the configuration."""
    if spec.role not in ROLES:
        raise ConfigError("trainer.name", f"torch for role {spec.role}", f"it serves {', '.join(ROLES)}")
    if spec.temperature <= 0:
        raise ConfigError("rollout.temperature", spec.temperature, "log-probs need a temperature above 0")


def check_outputs(algorithm: Algorithm, role: str = "actor") -> None:
    """Log-probs and entropy come from the model's own head, `rewards` from a scalar one: not both from one model."""
    name, wanted = type(algorithm).__name__, {output.name for output in algorithm.outputs()}
    if role != "actor":
        if role not in algorithm.fits:
            raise ConfigError("algorithm.name", name, f"it has no loss for a {role}; choose one that does, such as ppo")
        return
    if wanted != {"rewards"} and (beyond := sorted(wanted - HEAD_OUTPUTS)):
        able = f"the torch trainer gives {', '.join(sorted(HEAD_OUTPUTS))}, or rewards alone"
        raise ConfigError("algorithm.name", name, f"it needs {', '.join(beyond)}; {able}")


def set_up(spec: TrainerSpec) -> Callable[[], None]:
    """Threads and determinism are the process's own; returns what puts determinism back."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))
    if not spec.deterministic:
        return _nothing
    before = torch.are_deterministic_algorithms_enabled()
    # cuBLAS reads it once, when the first handle is made
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(before)


def _nothing(*_: Any) -> None:
    """Nothing was changed."""


def choose_device(wanted: str, rank: int = 0) -> torch.device:
    """Ranks that see all GPUs of a machine take one each; one that sees its own alone takes that."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("trainer.device", wanted, "torch sees no GPU here; use cpu or auto")
    if not available or wanted == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
