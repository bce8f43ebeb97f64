# SPDX-License-Identifier: Apache-2.0
"""Checks and choices before the model is loaded: spec, threads, determinism, device, number formats and attention.

Trained weights, their gradients and the optimizer's state are always float32, so that rounding does not swallow small
updates. `model.dtype` is the format of matrix products and of exported weights. Published weights have the same format
unless `rollout.dtype` names another for the engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from relax_core.api import Algorithm, ConfigError, TrainerSpec
from relax_plugin_torch.options import Attention

TRAINED_ROLES = ("actor", "critic")
ROLES = (*TRAINED_ROLES, "reference", "actor_fwd", "teacher")
HEAD_OUTPUTS = frozenset({"log_probs", "entropy", "top_k", "log_probs_at"})
"""Outputs that a language model's head can compute."""


def check_spec(spec: TrainerSpec) -> None:
    """Raise ConfigError for a role or a temperature that this trainer does not support."""
    if spec.role not in ROLES:
        raise ConfigError("trainer.name", f"torch for role {spec.role}", f"torch supports the roles {', '.join(ROLES)}")
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
        able = f"the torch trainer computes {', '.join(sorted(HEAD_OUTPUTS))}, or rewards alone"
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
        raise ConfigError("model.dtype", repr(name), f"the torch trainer computes in {', '.join(FORMATS)}")
    lacking = bfloat16_lacks(device) if name == "bfloat16" else ""
    if lacking:
        raise ConfigError("model.dtype", repr(name), f"{lacking} does not compute in bfloat16; use float16 or float32")
    return FORMATS[name]


def publish_format(spec: TrainerSpec, computes: torch.dtype) -> torch.dtype:
    """Return the format of weights sent to engines. Raises ConfigError if the trainer can't publish in it."""
    name = spec.publish_dtype
    if name and name not in FORMATS:
        raise ConfigError("rollout.dtype", repr(name), f"the torch trainer publishes {', '.join(FORMATS)}")
    return FORMATS[name] if name else computes


def frozen_format(publishes: torch.dtype, computes: torch.dtype) -> torch.dtype:
    """Return the format in which frozen weights are stored.

    It is the format of matrix products if weights are published in that format too. Otherwise it is float32, so that
    published weights are not rounded twice.
    """
    return computes if publishes == computes else torch.float32


def bfloat16_lacks(device: torch.device) -> str:
    """Return the GPU's name if it only emulates bfloat16, which is slow; empty for any other device."""
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return torch.cuda.get_device_name(device)


def rounded(dtype: torch.dtype) -> torch.dtype | None:
    """Return the autocast format of matrix products; None for float32, which needs no autocast."""
    return None if dtype == torch.float32 else dtype


FLASH = "flash_attention_2"


def choose_attention(wanted: Attention, device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    """Return the attention implementation by its name in transformers. Raises ConfigError if flash-attn can't run.

    flash-attn reads rows of any length, packed into one sequence without padding. It needs a GPU and a 16-bit format.
    `sdpa` and `eager` read padded batches: each batch entry is one row, or all rows of a group under an exact mask.
    """
    if wanted not in ("auto", FLASH):
        return wanted
    lacking = _lacking(device, dtype, deterministic)
    if wanted == FLASH and lacking:
        raise ConfigError("trainer.attention", repr(wanted), f"{lacking}; use auto")
    return "sdpa" if lacking else FLASH


def _lacking(device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    """Return the reason why flash-attn can't be used; empty if it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 and float16 only: set model.dtype"
    if deterministic:
        return "its gradients differ between runs, and deterministic is set"
    return "" if _installed() else "it needs the package flash-attn"


def _installed() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())
