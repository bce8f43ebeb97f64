# SPDX-License-Identifier: Apache-2.0
"""Typed options and their layers: from TOML files and overrides to one checked `RunConfig`. Import-light and lazy.

A new core key is a field of a table in `training.py` or `operation.py`; schema, hints and reference follow from it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_core.options.checks import holdout_errors as holdout_errors
    from relax_core.options.composition import Composed as Composed
    from relax_core.options.composition import Origins as Origins
    from relax_core.options.composition import compose as compose
    from relax_core.options.composition import load as load
    from relax_core.options.layers import plugin_files as plugin_files
    from relax_core.options.problems import ConfigProblems as ConfigProblems
    from relax_core.options.run_config import RunConfig as RunConfig
    from relax_core.options.toml_text import to_toml as to_toml

_HOME = {
    "Composed": "composition",
    "compose": "composition",
    "ConfigProblems": "problems",
    "Origins": "composition",
    "RunConfig": "run_config",
    "holdout_errors": "checks",
    "load": "composition",
    "plugin_files": "layers",
    "to_toml": "toml_text",
}
__all__ = tuple(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"relax_core.options has no {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(f"relax_core.options.{_HOME[name]}"), name)
