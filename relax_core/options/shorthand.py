# SPDX-License-Identifier: Apache-2.0
"""Bare strings written out as the tables they are short for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from relax_core.api.kinds import BY_TABLE
from relax_core.options.tree import KeyPath


def written_out(data: Mapping[str, Any]) -> dict[str, Any]:
    """A whole layer."""
    return {key: expand((key,), value) for key, value in data.items()}


def expand(path: KeyPath, value: Any) -> Any:
    """`grpo` at `algorithm` is `{name = "grpo"}`, `async` at `placement` is `{mode = "async"}`, a folder at `teachers` one
    teacher, and the engine of a pool is a component like that of the run."""
    if path == ("placement",) and isinstance(value, str):
        return {"mode": value}
    if path == ("teachers",):
        teachers = [value] if isinstance(value, str | os.PathLike | Mapping) else value
        if not isinstance(teachers, list | tuple):
            return value
        return [{"path": teacher} if isinstance(teacher, str | os.PathLike) else teacher for teacher in teachers]
    if path == ("engines",) and isinstance(value, list | tuple):
        return [expand(("engines", ""), pool) for pool in value]
    if path[0] == "engines" and len(path) == 2 and isinstance(value, Mapping) and "engine" in value:
        return {**value, "engine": expand((*path, "engine"), value["engine"])}
    if path[0] == "engines" and path[-1] == "engine" and len(path) == 3:
        return {"name": value} if isinstance(value, str) else value
    if path[0] == "environments" and path[-1] == "algorithm" and len(path) == 3:
        return {"name": value} if isinstance(value, str) else value
    if path[0] == "environments" and len(path) == 2 and isinstance(value, Mapping) and "algorithm" in value:
        return {**value, "algorithm": expand((*path, "algorithm"), value["algorithm"])}
    kind = BY_TABLE.get(path[0])
    if kind is None or len(path) > 1 + kind.many:
        return value
    if kind.many and len(path) == 1:
        items = [value] if isinstance(value, str | Mapping) else value
        return [expand((*path, ""), item) for item in items] if isinstance(items, list | tuple) else value
    return {"name": value} if isinstance(value, str) else value
