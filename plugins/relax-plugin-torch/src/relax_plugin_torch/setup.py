# SPDX-License-Identifier: Apache-2.0
"""The steps before the model is loaded: checks that the spec can be served, threads, determinism, device, number formats
and attention.

Weights that are trained, their gradients and the optimizer's state are float32 whatever the format of matrix products is, so
that small steps add up. What is exported is in that format, what is published in the engines'.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

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
    """Refuse outputs that no model gives: log-probs and entropy come from its own head, or `rewards` from a scalar one."""
    name, wanted = type(algorithm).__name__, {output.name for output in algorithm.outputs()}
    if role != "actor":
        if role not in algorithm.fits:
            raise ConfigError("algorithm.name", name, f"it has no loss for a {role}; choose one that does, such as ppo")
        return
    if wanted != {"rewards"} and (beyond := sorted(wanted - HEAD_OUTPUTS)):
        able = f"the torch trainer gives {', '.join(sorted(HEAD_OUTPUTS))}, or rewards alone"
        raise ConfigError("algorithm.name", name, f"it needs {', '.join(beyond)}; {able}")


def set_up(spec: TrainerSpec) -> Callable[[], None]:
    """Set threads and determinism, which are the process's own; return a function that puts determinism back."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))
    if not spec.deterministic:
        return lambda: None
    before = torch.are_deterministic_algorithms_enabled()
    # cuBLAS reads it once, when the first handle is made
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(before)


def choose_device(wanted: str, rank: int = 0) -> torch.device:
    """Choose a device: ranks that see all GPUs of a machine take one each; one that sees its own alone takes that."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("trainer.device", wanted, "torch sees no GPU here; use cpu or auto")
    if not available or wanted == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_format(name: Any, device: torch.device) -> torch.dtype:
    """Return the format that `[model] dtype` names. Raises ConfigError for one that this device does not compute in."""
    if name not in FORMATS:
        raise ConfigError("model.dtype", repr(name), f"the torch trainer has {', '.join(FORMATS)}")
    lacking = bfloat16_lacks(device) if name == "bfloat16" else ""
    if lacking:
        raise ConfigError("model.dtype", repr(name), f"{lacking} does not compute in bfloat16; use float16 or float32")
    return FORMATS[name]


def publish_format(spec: TrainerSpec, computes: torch.dtype) -> torch.dtype:
    """Return the format of weights sent to engines. Raises ConfigError for one that the trainer does not publish."""
    name = spec.publish_dtype
    if name and name not in FORMATS:
        raise ConfigError("rollout.dtype", repr(name), f"the torch trainer publishes {', '.join(FORMATS)}")
    return FORMATS[name] if name else computes


def frozen_format(publishes: torch.dtype, computes: torch.dtype) -> torch.dtype:
    """Return the format in which frozen weights lie: rounded as they are computed with, unless engines are to get them in
    another format, for which they would have been rounded twice."""
    return computes if publishes == computes else torch.float32


def bfloat16_lacks(device: torch.device) -> str:
    """Name the GPU that would only imitate bfloat16, at a fraction of its speed; a CPU computes in every format."""
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return torch.cuda.get_device_name(device)


def rounded(dtype: torch.dtype) -> torch.dtype | None:
    """Return the format that matrix products are rounded to; None where it is that of the weights."""
    return None if dtype == torch.float32 else dtype


FLASH = "flash_attention_2"
Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]


def choose_attention(wanted: Attention, device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    """Choose attention by its name in transformers. Raises ConfigError where what is asked for does not run here.

    flash-attn reads rows of any length from one line and pays for no padding. It needs a GPU and a format of 16 bits;
    anywhere else rows lie in rectangles, and masks keep them apart exactly.
    """
    if wanted not in ("auto", FLASH):
        return wanted
    lacking = _lacking(device, dtype, deterministic)
    if wanted == FLASH and lacking:
        raise ConfigError("trainer.attention", repr(wanted), f"{lacking}; use auto")
    return "sdpa" if lacking else FLASH


def _lacking(device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    """Say why flash-attn can't be had; empty: it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 and float16 alone: set model.dtype"
    if deterministic:
        return "its gradients differ between runs, and deterministic is set"
    return "" if _installed() else "it needs the package flash-attn"


def _installed() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())
