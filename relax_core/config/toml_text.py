# SPDX-License-Identifier: Apache-2.0
"""TOML text: a configuration written so that it reads well and parses back to the same one, and the lines of a file's keys.

The standard library parses TOML but neither writes it nor keeps positions.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_core.config.run_config import RunConfig

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
KeyPath = tuple[str, ...]


def to_toml(config: RunConfig, comment: Callable[[str], str] = lambda key: "") -> str:
    """Write the whole resolved configuration; `comment` may add a remark to a key such as `rollout.top_p`."""
    data = config.dump()
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping) or _is_tables(value)}
    lines = list(_table({key: value for key, value in data.items() if key not in tables}, "", "", comment))
    for key, value in tables.items():
        lines += _headed(f"[{toml_key(key)}]", value, toml_key(key), key, comment)
    return "\n".join(lines) + "\n"


def _headed(header: str, value: Any, name: str, prefix: str, comment: Callable[[str], str]) -> Iterator[str]:
    """A table under its header, or each of an array of tables under `[header]`."""
    if isinstance(value, Mapping):
        yield from ("", header, *_table(value, name, f"{prefix}.", comment))
        return
    for index, entry in enumerate(value):
        yield from ("", f"[{header}]", *_table(entry, name, f"{prefix}.{index}.", comment))


def _table(table: Mapping[str, Any], name: str, prefix: str, comment: Callable[[str], str]) -> Iterator[str]:
    """Assignments of a table, then arrays of tables in it, such as `[[eval.sets]]`."""
    nested = {key: value for key, value in table.items() if _is_tables(value)}
    for key, value in table.items():
        if key not in nested:
            remark = comment(f"{prefix}{key}")
            yield f"{toml_key(key)} = {literal(value)}" + (f"  # {remark}" if remark else "")
    for key, entries in nested.items():
        full = f"{name}.{toml_key(key)}"
        yield from _headed(f"[{full}]", entries, full, f"{prefix}{key}", comment)


def toml_key(key: str) -> str:
    """Write a key, bare where TOML allows it."""
    return key if BARE_KEY.fullmatch(key) else literal(key)


def literal(value: Any) -> str:
    """Write one value on one line."""
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


def key_lines(text: str) -> dict[KeyPath, int]:
    """Find the line of every table header and key of valid TOML; indices of arrays count as keys.

    The text is cut into statements, each the fewest lines that parse.
    """
    found: dict[KeyPath, int] = {}
    sizes: dict[KeyPath, int] = {}
    table: KeyPath = ()
    start, pending = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        if not pending:
            start = number
        pending = f"{pending}\n{line}" if pending else line
        try:
            data = tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        header = pending.lstrip()
        pending = ""
        if header.startswith("["):
            table = _header_path(data, sizes, opens=header.startswith("[["))
            found.setdefault(table, start)
        else:
            found.update({(*table, *path): start for path in _key_paths(data)})
    return found


def _header_path(node: Any, sizes: dict[KeyPath, int], *, opens: bool) -> KeyPath:
    """Path of a parsed header, with the index in each array of tables on it; `opens` starts a new table of the last."""
    path: KeyPath = ()
    while node:
        if isinstance(node, list):
            node = node[0]
            continue
        key, node = next(iter(node.items()))
        path = (*path, key)
        if opens and node == [{}]:
            sizes[path] = sizes.get(path, 0) + 1
        if path in sizes:
            path = (*path, str(sizes[path] - 1))
    return path


def _key_paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _key_paths(item, (*path, str(key)))
