# SPDX-License-Identifier: Apache-2.0
"""Descriptions of components and commands (`relax plugins show`), and the selection of plugins by name."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from relax_core.api.command import RelaxCommand
from relax_core.api.component import KINDS, Configurable
from relax_core.registry.catalogue import Catalogue, known_kind, missing_anywhere
from relax_core.registry.commands import Commands
from relax_core.registry.handshake import Record
from relax_core.registry.loader import import_target

if TYPE_CHECKING:
    from relax_core.api.options import Options

HEAVY = ("torch", "ray", "pydantic", "transformers", "tensorflow", "jax", "vllm", "sglang")
"""Packages that a plugin's module may not import, because every `relax` command imports the modules of all plugins."""
IMPORT_S = 120.0
"""Seconds that the import of a plugin's module may take."""


@dataclass(frozen=True, slots=True)
class OptionDescription:
    """One option of a component."""

    name: str
    type: str
    required: bool
    default: object
    """Default as plain data; None for a required option."""
    doc: str


@dataclass(frozen=True, slots=True)
class ComponentDescription:
    """A component as its class and its plugin describe it."""

    kind: str
    name: str
    help: str
    experimental: bool
    distribution: str
    version: str
    target: str
    source: str
    """`file:line` of the class; empty if the class has no source file."""
    doc: str
    capabilities: Mapping[str, object]
    """The class attributes that the base class of the kind declares, as plain data."""
    options: tuple[OptionDescription, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CommandDescription:
    """A command as its function and its distribution describe it."""

    command: RelaxCommand
    distribution: str
    version: str
    doc: str

    def as_dict(self) -> dict[str, object]:
        plugin = {"distribution": self.distribution, "version": self.version, "doc": self.doc}
        return {"kind": "command", **asdict(self.command), **plugin}


def describe(catalogue: Catalogue, kind: str, name: str) -> ComponentDescription:
    """Import a component and describe it."""
    found, cls = catalogue.find(kind, name), catalogue.target(kind, name)
    try:
        source = f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        source = ""  # compiled or built at run time
    component = found.component
    return ComponentDescription(
        kind, component.name, component.help, component.experimental, found.distribution, found.version,
        component.target, source, inspect.getdoc(cls) or "", capabilities(kind, cls),
        options(cls.options_model()) if KINDS[kind].base else (),
    )  # fmt: skip


def describe_command(name: str) -> CommandDescription:
    """Import a command and describe it. Raises ConfigError or PluginError for a command that cannot be called."""
    command, record = offered = Commands().find(name)
    return CommandDescription(command, record.distribution, record.version, offered.parser(command.name).help or "")


def capabilities(kind: str, cls: type[Configurable]) -> dict[str, object]:
    """Return the class attributes that the base class of the kind declares, with their values in `cls`."""
    if not known_kind(kind).base:
        return {}

    def class_attributes(owner: type) -> list[str]:
        annotations = vars(owner).get("__annotations__", {})
        return [name for name, annotation in annotations.items() if str(annotation).startswith("ClassVar")]

    base: Any = import_target(known_kind(kind).base)
    owners = [owner for owner in reversed(base.__mro__) if owner.__module__.startswith("relax_core.")]
    declared = dict.fromkeys(name for owner in owners for name in class_attributes(owner))
    return {name: plain(getattr(cls, name)) for name in declared if name not in class_attributes(Configurable)}


def options(model: type[Options]) -> tuple[OptionDescription, ...]:
    """Describe each option of a component."""
    return tuple(
        OptionDescription(
            name,
            kind.__name__ if isinstance(kind := field.annotation, type) else str(kind).replace("typing.", ""),
            field.is_required(),
            None if field.is_required() else plain(field.get_default(call_default_factory=True)),
            field.description or "",
        )
        for name, field in model.model_fields.items()
    )


def plain(value: object) -> object:
    """Convert a value to data that JSON can hold; objects without a JSON type become text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def named(catalogue: Catalogue, name: str) -> list[Record]:
    """Return the plugins whose distribution, entry point, file name or location is `name`."""
    return [record for record in catalogue.records if name in (record.distribution, record.name, record.location)]


def selected(catalogue: Catalogue, name: str) -> list[Record]:
    """Return the plugins with this name; for the name of a component or command, its plugins reduced to that name.

    Raises the error of an unknown name.
    """
    if records := named(catalogue, name):
        return records
    wanted, _, bare = name.rpartition(":")
    kept = [
        replace(
            record,
            components=tuple(offered for offered in record.components if offered.component.name == bare),
            commands=tuple(command for command in record.commands if command.name == bare),
        )
        for record in catalogue.records
        if wanted in ("", record.distribution, record.name)
    ]
    if not (found := [record for record in kept if record.components or record.commands]):
        raise missing_anywhere(name, catalogue.records)
    return found


def heavy_imports(module: str) -> str:
    """Import a plugin's module alone in a fresh interpreter; return the problem, or "" if the import is light."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} takes more than {IMPORT_S:.0f} s; import heavy libraries inside functions"
    if done.returncode:
        return done.stderr.strip()
    heavy = ", ".join(done.stdout.split())
    return f"{module} imports {heavy}; name targets as strings, and import it in their modules" if heavy else ""
