# SPDX-License-Identifier: Apache-2.0
"""What algorithms and trainers are made of: batches, chunk plans, and the parts of a loss. Imports only `api`.

Names load on first use. Counting, planning and lag need numpy alone, so a shell that plans chunks never loads torch;
write `from relax_core import learn` and `learn.clipped_surrogate(...)` to keep an algorithm's file light as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "advantages": ("group_mean", "group_mean_std"),
    "counts": ("count",),
    "gradient": ("rows_with_gradient",),
    "groups": ("Grouping",),
    "kl": ("kl_k1", "kl_k2", "kl_k3"),
    "lag": ("check_lag",),
    "metrics": ("mean", "merge_metrics"),
    "outputs": ("Outputs",),
    "packed": ("PackedBatch",),
    "plan": ("plan_micro_batches",),
    "ratio": ("log_ratio",),
    "reduction": ("Denominators", "reduce"),
    "schedule": ("SCHEDULES", "lr_factor"),
    "score": ("score_tokens",),
    "surrogate": ("clipped", "clipped_surrogate"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"relax_core.learn has no {name!r}; it exports {', '.join(sorted(_MODULE))}")
    return getattr(importlib.import_module(f"relax_core.learn.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULE)


if TYPE_CHECKING:
    from relax_core.learn.advantages import group_mean as group_mean
    from relax_core.learn.advantages import group_mean_std as group_mean_std
    from relax_core.learn.counts import count as count
    from relax_core.learn.gradient import rows_with_gradient as rows_with_gradient
    from relax_core.learn.groups import Grouping as Grouping
    from relax_core.learn.kl import kl_k1 as kl_k1
    from relax_core.learn.kl import kl_k2 as kl_k2
    from relax_core.learn.kl import kl_k3 as kl_k3
    from relax_core.learn.lag import check_lag as check_lag
    from relax_core.learn.metrics import mean as mean
    from relax_core.learn.metrics import merge_metrics as merge_metrics
    from relax_core.learn.outputs import Outputs as Outputs
    from relax_core.learn.packed import PackedBatch as PackedBatch
    from relax_core.learn.plan import plan_micro_batches as plan_micro_batches
    from relax_core.learn.ratio import log_ratio as log_ratio
    from relax_core.learn.reduction import Denominators as Denominators
    from relax_core.learn.reduction import reduce as reduce
    from relax_core.learn.schedule import SCHEDULES as SCHEDULES
    from relax_core.learn.schedule import lr_factor as lr_factor
    from relax_core.learn.score import score_tokens as score_tokens
    from relax_core.learn.surrogate import clipped as clipped
    from relax_core.learn.surrogate import clipped_surrogate as clipped_surrogate
