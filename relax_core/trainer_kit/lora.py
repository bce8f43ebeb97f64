# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA) as every trainer has them: the table `[model.lora]`, and names of tensors.

An adapter is a pair of matrices, A [rank, inputs] and B [outputs, rank]; the layer computes base + scale * B A.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

FIELD = "model.lora"
FOLDER = "adapter"
"""Folder within an export that holds the adapters in peft's format."""
NAME = "default"
"""Name that peft gives the only adapters of a model."""
_PEFT, _BASE = "base_model.model.", "base_layer."


@dataclass(frozen=True, slots=True)
class LoraTable:
    """The settings of the table `[model.lora]` as plain data."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    export_adapter: bool = True

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        return cls(**values)

    def with_parts(self, targets: tuple[str, ...], modules_to_save: tuple[str, ...]) -> Self:
        return replace(self, targets=targets, modules_to_save=modules_to_save)

    @property
    def scale(self) -> float:
        return float(self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank))

    @property
    def plain(self) -> bool:
        """True if the adapter consists only of matrix pairs A and B, so that it can be published without the base."""
        return not self.dora and not self.modules_to_save


def matrix(module: str, side: str) -> str:
    """Return the name of the matrix A or B of a module's adapter, as checkpoints hold it."""
    return f"{module}.lora_{side}.{NAME}.weight"


def is_adapter(name: str) -> bool:
    """Return True for the name of a matrix A or B."""
    return name.endswith((matrix("", "A"), matrix("", "B")))


def base_name(name: str) -> str:
    """Return the name that a tensor has in the model without adapters."""
    return name.replace(_BASE, "")


def peft_name(name: str) -> str:
    """Return the name under which peft saves, and transports send, a tensor that training changes."""
    name = re.sub(rf"\.lora_magnitude_vector\.{NAME}\.weight$", ".lora_magnitude_vector", name)
    return _PEFT + base_name(name.replace(f".{NAME}.", "."))


def short_names(adapted: tuple[str, ...], modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the last parts of the adapted modules' names; the whole names if last parts match further `modules`."""
    ends = {module.rpartition(".")[2] for module in adapted}
    meant = {module for module in modules if module.rpartition(".")[2] in ends}
    return tuple(sorted(ends)) if meant == set(adapted) else adapted
