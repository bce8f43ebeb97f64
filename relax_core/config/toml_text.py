# SPDX-License-Identifier: Apache-2.0
"""A configuration as TOML that reads well and parses back to the same one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relax_core.config.run_config import RunConfig

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(config: RunConfig, comment: Callable[[str], str] | None = None) -> str:
    """The whole resolved configuration; `comment` may add a remark to a key such as `rollout.top_p`."""
    return "\n".join(_document(config.dump(), comment or (lambda key: ""))) + "\n"


def _document(data: Mapping[str, Any], comment: Callable[[str], str]) -> Iterator[str]:
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping) or _is_tables(value)}
    yield from _assignments({key: value for key, value in data.items() if key not in tables}, "", comment)
    for key, value in tables.items():
        many = not isinstance(value, Mapping)
        for index, entry in enumerate(value if many else [value]):
            yield ""
            yield f"[[{toml_key(key)}]]" if many else f"[{toml_key(key)}]"
            yield from _table(entry, key, f"{key}.{index}." if many else f"{key}.", comment)


def _table(table: Mapping[str, Any], name: str, prefix: str, comment: Callable[[str], str]) -> Iterator[str]:
    """One table; arrays of tables in it, such as `[[eval.sets]]`, get headers of their own after it."""
    nested = {key: value for key, value in table.items() if _is_tables(value)}
    yield from _assignments({key: value for key, value in table.items() if key not in nested}, prefix, comment)
    for key, entries in nested.items():
        for index, entry in enumerate(entries):
            yield ""
            yield f"[[{name}.{toml_key(key)}]]"
            yield from _assignments(entry, f"{prefix}{key}.{index}.", comment)


def _assignments(table: Mapping[str, Any], prefix: str, comment: Callable[[str], str]) -> Iterator[str]:
    for key, value in table.items():
        remark = comment(f"{prefix}{key}")
        yield f"{toml_key(key)} = {literal(value)}" + (f"  # {remark}" if remark else "")


def toml_key(key: str) -> str:
    """Bare where TOML allows it."""
    return key if BARE_KEY.fullmatch(key) else literal(key)


def literal(value: Any) -> str:
    """One value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return re.sub(r"e([+-])0+", r"e\1", repr(value))
    if isinstance(value, Mapping):
        items = ", ".join(f"{toml_key(str(key))} = {literal(item)}" for key, item in value.items() if item is not None)
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(item) for item in value)}]"
    return str(value)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
