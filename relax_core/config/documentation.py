# SPDX-License-Identifier: Apache-2.0
"""What the models say about their fields, as data: the one source of reference, `explain` and the starter file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from relax_core.api.component import BY_TABLE
from relax_core.api.options import Options
from relax_core.api.secret import Secret
from relax_core.config.annotation import annotation_of, is_table, is_tables, models_in
from relax_core.config.choice import DEFAULT_NAMES, keys_model
from relax_core.config.run_config import Core, core_tables, top_level_keys
from relax_core.config.toml_text import literal

WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Secret: "secret"}


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One key."""

    name: str
    type: str
    default: str
    """As TOML; empty where the key is required or absent by default."""
    required: bool
    text: str


@dataclass(frozen=True, slots=True)
class TableDoc:
    """One table; an empty name is the top level."""

    name: str
    many: bool
    text: str
    fields: tuple[FieldDoc, ...]


def core_documentation() -> Iterator[TableDoc]:
    """The top level and every core table, tables within tables after their owner."""
    own = tuple(field_doc(name, Core.model_fields[name]) for name in top_level_keys())
    yield TableDoc("", False, "Keys before the first table.", own)
    for name, model in core_tables().items():
        yield from table_docs(name, model, is_tables(Core.model_fields[name].annotation))


def table_docs(name: str, model: type[BaseModel], many: bool = False) -> Iterator[TableDoc]:
    """A table and the tables in it."""
    yield TableDoc(name, many, summary(model), tuple(fields_of(model)))
    for key, field in model.model_fields.items():
        for nested in models_in(field.annotation):
            yield from table_docs(f"{name}.{key}", nested, is_tables(field.annotation))


def component_documentation(table: str) -> TableDoc:
    """What the core knows of a component table: the name and the core's own keys."""
    kind = BY_TABLE[table]
    default = DEFAULT_NAMES.get(table, "")
    name = FieldDoc("name", "text", literal(default) if default else "", not default, f"Which {kind.name}.")
    text = f"Any number, one {kind.name} each." if kind.many else f"The {kind.name}, by name."
    return TableDoc(table, kind.many, text, (name, *fields_of(keys_model(table))))


def fields_of(model: type[BaseModel]) -> Iterator[FieldDoc]:
    """Keys of a model that are not tables of their own."""
    for name, field in model.model_fields.items():
        if not (is_table(field.annotation) or is_tables(field.annotation)):
            yield field_doc(name, field)


def field_doc(name: str, field: FieldInfo) -> FieldDoc:
    """One field in words."""
    text = " ".join((field.description or "").split())
    return FieldDoc(name, type_text(annotation_of(field)), default_text(field), field.is_required(), text)


def summary(model: type[BaseModel]) -> str:
    """First paragraph of the model's own docstring; empty where it has none."""
    own = model.__dict__.get("__doc__") or ""
    return " ".join(own.split("\n\n")[0].split()) if model is not Options else ""


def default_text(field: FieldInfo) -> str:
    """The default as TOML."""
    default = field.get_default(call_default_factory=True) if field.default_factory is None else field.default_factory()  # type: ignore[call-arg]
    if default is PydanticUndefined or default is None:
        return ""
    plain = default.model_dump(mode="json", exclude_none=True) if isinstance(default, BaseModel) else default
    return literal(str(plain) if isinstance(plain, Path | Secret) else plain)


def type_text(annotation: Any) -> str:
    """An annotation in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " or ".join(literal(item) for item in arguments)
    if origin in (list, tuple, set, frozenset):
        if origin is tuple and Ellipsis not in arguments:
            return f"list of {len(arguments)}: {', '.join(type_text(item) for item in arguments)}"
        return f"list of {type_text(arguments[0])}"
    if origin is dict or annotation is dict:
        return "table"
    if _is_union(origin):
        return " or ".join(dict.fromkeys(type_text(item) for item in arguments if item is not type(None)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return WORDS.get(annotation, getattr(annotation, "__name__", "value").lower())


def _is_union(origin: Any) -> bool:
    from types import UnionType

    return origin in (Union, UnionType)
