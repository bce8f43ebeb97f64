# SPDX-License-Identifier: Apache-2.0
"""A record: what is known of one plugin, loaded or not. Plain data, so that listing and workers can pass it on.

What a plugin that was not loaded would have offered: component names read from its source, without running it.

A guess for error messages only; a plugin that builds its components in a loop can't be read this way.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

from relax_core.api.component import Component


class PluginState(StrEnum):
    """Where a plugin stands after discovery."""

    OK = "ok"
    SKIPPED = "skipped"
    """Never imported: switched off by the environment, or its API range does not hold this core."""
    BROKEN = "broken"
    """Its import or one of its hooks failed."""


class Offered(NamedTuple):
    """A component under the kind of the hook that returned it."""

    kind: str
    component: Component


@dataclass(frozen=True, slots=True)
class Record:
    """One entry point of one distribution, one single file, or what was passed from Python."""

    name: str
    """The entry point's name, or the file's."""
    distribution: str
    version: str
    module: str
    location: str
    """Where its code lies; for an editable installation the project's directory."""
    editable: bool = False
    file: bool = False
    """A single-file plugin: it has neither distribution nor version of its own."""
    api_range: str = ""
    """Which relax-core it was written for, as its own metadata says."""
    state: PluginState = PluginState.OK
    reason: str = ""
    frames: str = ""
    """The traceback inside the plugin, where it is broken."""
    components: tuple[Offered, ...] = ()
    hooks: tuple[str, ...] = ()
    """Observer hooks it implements."""
    notes: tuple[str, ...] = ()
    """What a person should know though it works: a name that another plugin has too."""

    @property
    def title(self) -> str:
        """The plugin as a sentence names it."""
        return f"{self.distribution} {self.version}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """The record as `relax plugins list --json` prints it."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "location": self.location,
            "editable": self.editable,
            "api_range": self.api_range,
            "state": str(self.state),
            "reason": self.reason,
            "frames": self.frames,
            "components": [
                {
                    "kind": kind,
                    "name": component.name,
                    "target": component.target,
                    "help": component.help,
                    "experimental": component.experimental,
                }
                for kind, component in self.components
            ],
            "hooks": list(self.hooks),
            "notes": list(self.notes),
        }


def claims(record: Record, hook: str, name: str) -> bool:
    """Whether the plugin's source offers a component of this name from this hook."""
    source = _source(record)
    return source is not None and (hook, name) in set(_offers(source))


def _source(record: Record) -> ast.Module | None:
    spec = find_module(record.module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def find_module(module: str) -> ModuleSpec | None:
    """Find a module part by part: `importlib.util.find_spec` would import its parents."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = _ask_finders(".".join(parts[:end]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find and (spec := find(name, path, None)):
            return spec if isinstance(spec, ModuleSpec) else None
    return None


def _offers(source: ast.Module) -> Iterator[tuple[str, str]]:
    """(hook, name) of every call inside a function whose first argument, or `name`, is a literal string."""
    for function in (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for value in (*call.args[:1], *(k.value for k in call.keywords if k.arg == "name")):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield function.name, value.value
