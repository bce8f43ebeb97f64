# SPDX-License-Identifier: Apache-2.0
"""A component in words: where it is written, what it can do, its options with their documentation. Plain data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from relax_core.api.component import Configurable
from relax_core.registry.catalogue import Catalogue, known_kind
from relax_core.registry.contract import import_target
from relax_core.registry.record import Record

if TYPE_CHECKING:
    from relax_core.api.options import Options


def describe(catalogue: Catalogue, kind: str, name: str) -> dict[str, Any]:
    """What `relax plugins show` prints of a component; imports it."""
    found, cls = catalogue.find(kind, name), catalogue.target(kind, name)
    return {
        "kind": kind,
        "name": found.component.name,
        "help": found.component.help,
        "experimental": found.component.experimental,
        "distribution": found.distribution,
        "version": found.version,
        "target": found.component.target,
        "source": _source(cls),
        "doc": inspect.getdoc(cls) or "",
        "capabilities": capabilities(kind, cls),
        "options": options(cls.options_model()),
    }


def capabilities(kind: str, cls: type[Configurable]) -> dict[str, Any]:
    """The class attributes that the kind's base declares, as this class has them."""
    base: Any = import_target(known_kind(kind).base)
    declared = (name for owner in reversed(base.__mro__) for name in _class_attributes(owner) if name != "kind")
    return {name: plain(getattr(cls, name)) for name in dict.fromkeys(declared)}


def options(model: type[Options]) -> list[dict[str, Any]]:
    """One entry a field: name, type, default, documentation."""
    return [
        {
            "name": name,
            "type": _type_name(field.annotation),
            "required": field.is_required(),
            "default": None if field.is_required() else plain(field.get_default(call_default_factory=True)),
            "doc": field.description or "",
        }
        for name, field in model.model_fields.items()
    ]


def components_named(catalogue: Catalogue, name: str) -> list[tuple[str, str]]:
    """(kind, qualified name) of every component that this name can mean, in any kind."""
    wanted, _, bare = name.rpartition(":")
    return [
        (kind, f"{record.distribution}:{component.name}")
        for record in catalogue.records
        if wanted in ("", record.distribution, record.name)
        for kind, component in record.components
        if component.name == bare
    ]


def records_named(catalogue: Catalogue, name: str) -> list[Record]:
    """The records of a distribution, or of an entry point or file of this name or path."""
    return [record for record in catalogue.records if name in (record.distribution, record.name, record.location)]


def plain(value: object) -> Any:
    """Data that JSON can hold; what it can't becomes its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _class_attributes(owner: type) -> list[str]:
    annotations = vars(owner).get("__annotations__", {})
    return [name for name, annotation in annotations.items() if str(annotation).startswith("ClassVar")]


def _source(cls: type) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return ""  # compiled, or made at run time


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
