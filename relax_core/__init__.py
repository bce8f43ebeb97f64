# SPDX-License-Identifier: Apache-2.0
"""Relax: a plugin-based engine for reinforcement-learning post-training.

`relax.train("my.toml", rewards=[fn])`, `relax.open_run(directory)`, `relax.evaluate(target, "sets.toml")`,
`relax.export(directory, folder)` and `relax.bundle(directory)` are the Python API; each is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_core.notebook import bundle as bundle, evaluate as evaluate, export as export, train as train
    from relax_core.views.run import open_run as open_run

_HOME = {
    "bundle": "relax_core.notebook", "evaluate": "relax_core.notebook", "export": "relax_core.notebook",
    "open_run": "relax_core.views.run", "train": "relax_core.notebook",
}  # fmt: skip
__all__ = ["bundle", "evaluate", "export", "open_run", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"relax_core has no {name!r}; it exports {', '.join(__all__)}")
