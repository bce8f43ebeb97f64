# SPDX-License-Identifier: Apache-2.0
"""The file that `relax init` writes: the important keys set, the others there as comments, each with its documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_core.config.choice import DEFAULT_NAMES
from relax_core.config.documentation import FieldDoc, TableDoc, core_documentation
from relax_core.config.toml_text import literal

IMPORTANT = {
    "": ("steps", "seed"),
    "rollout": ("prompts_per_step", "group_size", "max_new_tokens"),
    "optimizer": ("lr",),
    "eval": ("every",),
    "placement": ("mode",),
    "checkpoint": ("every",),
}
WIDTH = 100


def starter(model: str, data: str, reward: str, name: str) -> str:
    """A commented TOML; `model` and `data` are paths relative to where it will stand."""
    given: dict[str, dict[str, Any]] = {"model": {"path": model}, "data": {"train": data}, "run": {"name": name}}
    docs = list(core_documentation())
    return "\n".join(_file(docs, given, reward)) + "\n"


def relative(path: Path, home: Path) -> str:
    """As it is written in a file in `home`; absolute where it lies elsewhere."""
    path, home = path.absolute(), home.absolute()
    return str(path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _file(docs: list[TableDoc], given: Mapping[str, Mapping[str, Any]], reward: str) -> Iterator[str]:
    yield "# A Relax run. `relax config explain KEY THIS_FILE` says more about a key; a commented line shows the default."
    for doc in docs:
        yield ""
        if doc.name.count(".") or doc.many:
            yield from _nested(doc)
            continue
        if doc.name:
            yield from _comment(doc.text)
            yield f"[{doc.name}]"
        for field in doc.fields:
            yield from _field(field, doc.name, given.get(doc.name, {}))
        if not doc.name:
            yield from _components(reward)


def _field(field: FieldDoc, table: str, given: Mapping[str, Any]) -> Iterator[str]:
    yield from _comment(field.text)
    default = field.default or f"...  # {field.type}"
    if field.name in given:
        yield f"{field.name} = {literal(given[field.name])}"
    elif field.name in IMPORTANT.get(table, ()):
        yield f"{field.name} = {default}"
    else:
        yield f"# {field.name} = {default}"


def _nested(doc: TableDoc) -> Iterator[str]:
    """A table within a table: all of it as comments."""
    yield from _comment(doc.text)
    yield f"# [[{doc.name}]]" if doc.many else f"# [{doc.name}]"
    for field in doc.fields:
        yield f"#   {field.name} = {field.default or '...'}  # {field.text}"


def _components(reward: str) -> Iterator[str]:
    yield ""
    yield from _comment("Components by name; `relax plugins list` shows what is installed. A table sets options too.")
    for table in ("algorithm", "engine", "trainer", "environment"):
        bare = f"{table} = {literal(DEFAULT_NAMES[table])}"
        yield bare if table == "algorithm" else f"# {bare}"
    yield f"rewards = [{literal(reward)}]"


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH):
        yield f"# {line}"
