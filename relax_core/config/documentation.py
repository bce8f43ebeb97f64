# SPDX-License-Identifier: Apache-2.0
"""Documentation made from the models: fields in words, one key explained, and the starter file of `relax init`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from relax_core.api.component import BY_TABLE
from relax_core.api.errors import ConfigError
from relax_core.api.options import Options, Secret
from relax_core.config.annotation import annotation_of, is_table, is_tables, models_in
from relax_core.config.compose import Composed
from relax_core.config.problems import unknown_key
from relax_core.config.run_config import DEFAULT_NAMES, Core, core_tables, keys_model, table_keys, top_level_keys
from relax_core.config.toml_text import literal
from relax_core.registry.catalogue import Catalogue

WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Secret: "secret"}
IMPORTANT = {
    "": ("steps", "seed"),
    "rollout": ("prompts_per_step", "group_size", "max_new_tokens"),
    "optimizer": ("lr",),
    "eval": ("every",),
    "placement": ("mode",),
    "checkpoint": ("every",),
}
"""Keys that a starter file sets, by table."""
WIDTH = 100


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
    """Return what the core knows of a component table: the name and the core's own keys."""
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
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_text(item) for item in arguments if item is not type(None)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return WORDS.get(annotation, getattr(annotation, "__name__", "value").lower())


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation of one configuration key: its value, origin and type."""

    key: str
    value: Any
    """Plain data; None where nothing was chosen."""
    origin: str
    type: str
    default: str
    text: str
    component: str = ""
    """The component that reads it, in its own words."""


def explain(key: str, composed: Composed, catalogue: Catalogue) -> Explained:
    """Raises ConfigError for a key that nobody reads."""
    path = key.split(".")
    value, origin = _value(composed.config.dump(), path), str(composed.origin_of(key))
    kind = BY_TABLE.get(path[0])
    if kind is None:
        return _documented(key, path, Core, value, origin, "")
    rest = path[1 + kind.many :]
    index = int(path[1]) if kind.many and len(path) > 1 and path[1].isdecimal() else 0
    choices = composed.config.components[path[0]]
    if index >= len(choices):
        many = "s" if kind.many else ""
        return Explained(key, value, origin, "table", "", f"The {kind.name}{many}, by name; nothing is chosen.")
    name = choices[index].name
    found, target = catalogue.find(kind.name, name), catalogue.target(kind.name, name)
    says = f"{kind.name} {found.title}: {found.component.help}"
    if not rest or rest == ["name"]:
        documented = inspect.cleandoc(target.__doc__ or "")
        return Explained(
            key, value, origin, "text" if rest else "table", "", f"Which {kind.name}.", f"{says}\n{documented}"
        )
    own = keys_model(path[0])
    model, by = (own, "") if rest[0] in own.model_fields else (target.options_model(), says)
    return _documented(key, rest, model, value, origin, by)


def _documented(key: str, path: list[str], model: Any, value: Any, origin: str, component: str) -> Explained:
    fields, known = {}, []
    annotation: Any = model
    field = None
    for part in path:
        if part.isdecimal() and field is not None:
            continue
        fields = {name: own for owner in models_in(annotation) for name, own in owner.model_fields.items()}
        if field is not None and not fields and value is not None:
            break
        known = list(fields)
        if part not in fields:
            everything = [*top_level_keys(), *table_keys()] if len(path) == 1 and model is Core else known
            raise unknown_key(key, everything, table_keys())
        field = fields[part]
        annotation = field.annotation
    if field is None:
        raise ConfigError("key", repr(key), "name a key, such as rollout.group_size")
    doc = field_doc(path[-1], field)
    tables = [summary(nested) for nested in models_in(field.annotation)]
    return Explained(key, value, origin, doc.type, doc.default, " ".join([doc.text, *filter(None, tables)]), component)


def _value(data: Any, path: list[str]) -> Any:
    for part in path:
        if isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return None
    return data


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
