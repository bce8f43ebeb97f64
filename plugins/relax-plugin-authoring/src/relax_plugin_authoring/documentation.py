# SPDX-License-Identifier: Apache-2.0
"""Documentation generated from the configuration's models and the options of components.

This module writes the text for one key (`relax config explain`), the Markdown reference, the JSON schema, and the
starter file of `relax init`. The schema leaves out components that cannot be imported, with a note for each.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from relax_core.api import ConfigError, Kind, Options, RelaxError, Secret
from relax_core.api.component import BY_TABLE
from relax_core.config.annotation import annotation_of, is_table, is_tables, models_in
from relax_core.config.problems import unknown_key
from relax_core.launch import (
    DEFAULT_NAMES,
    DEFAULT_SANDBOX,
    Catalogue,
    Composed,
    Core,
    core_tables,
    keys_model,
    literal,
    table_keys,
    top_level_keys,
)

WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Secret: "secret"}
IMPORTANT = {
    "": ("steps", "seed"),
    "rollout": ("groups_per_step", "group_size", "max_new_tokens"),
    "optimizer": ("lr",),
    "eval": ("every",),
    "placement": ("mode",),
    "checkpoint": ("every",),
}
"""table -> keys that a starter file sets; all further keys are comments."""
WIDTH = 100
DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """Documentation of one key."""

    name: str
    type: str
    default: str
    """Default as TOML; empty if the key is required or absent by default."""
    required: bool
    text: str


@dataclass(frozen=True, slots=True)
class TableDoc:
    """Documentation of one table; the top level has an empty name."""

    name: str
    many: bool
    text: str
    fields: tuple[FieldDoc, ...]


def core_documentation() -> Iterator[TableDoc]:
    """Yield the top level and every core table, each followed by the tables in it."""
    own = tuple(field_doc(name, Core.model_fields[name]) for name in top_level_keys())
    yield TableDoc("", False, "Keys before the first table.", own)
    for name, model in core_tables().items():
        yield from table_docs(name, model, is_tables(Core.model_fields[name].annotation))


def plugin_documentation(catalogue: Catalogue) -> Iterator[TableDoc]:
    """Yield the tables that plugins own, each followed by the tables in it."""
    for name, model in catalogue.tables().items():
        first, *rest = table_docs(name, model)
        yield replace(first, text=f"{first.text} From `{catalogue.find('table', name).distribution}`.".lstrip())
        yield from rest


def table_docs(name: str, model: type[BaseModel], many: bool = False) -> Iterator[TableDoc]:
    """Yield a table and the tables in it."""
    yield TableDoc(name, many, summary(model), tuple(fields_of(model)))
    for key, field in model.model_fields.items():
        for nested in models_in(field.annotation):
            yield from table_docs(f"{name}.{key}", nested, is_tables(field.annotation))


def component_documentation(table: str) -> TableDoc:
    """Return the documentation of a component table: its `name` and the core's keys, without a component's options."""
    kind = BY_TABLE[table]
    default = DEFAULT_SANDBOX if table == "sandbox" else DEFAULT_NAMES.get(table, "")
    name = FieldDoc("name", "text", literal(default) if default else "", not default, f"Name of the {kind.name}.")
    text = f"Any number of tables, one for each {kind.name}." if kind.many else f"The {kind.name}, chosen by name."
    return TableDoc(table, kind.many, text, (name, *fields_of(keys_model(table))))


def fields_of(model: type[BaseModel]) -> Iterator[FieldDoc]:
    """Yield the keys of a model that are not tables."""
    for name, field in model.model_fields.items():
        if not (is_table(field.annotation) or is_tables(field.annotation)):
            yield field_doc(name, field)


def field_doc(name: str, field: FieldInfo) -> FieldDoc:
    """Return the documentation of one field."""
    text = " ".join((field.description or "").split())
    return FieldDoc(name, type_text(annotation_of(field)), default_text(field), field.is_required(), text)


def summary(model: type[BaseModel]) -> str:
    """Return the first paragraph of the model's docstring; empty if the class has no docstring of its own."""
    own = model.__dict__.get("__doc__") or ""
    return " ".join(own.split("\n\n")[0].split()) if model is not Options else ""


def default_text(field: FieldInfo) -> str:
    """Return a field's default as TOML; empty if the field has no default."""
    default = field.get_default(call_default_factory=True) if field.default_factory is None else field.default_factory()  # type: ignore[call-arg]
    if default is PydanticUndefined or default is None:
        return ""
    plain = default.model_dump(mode="json", exclude_none=True) if isinstance(default, BaseModel) else default
    return literal(str(plain) if isinstance(plain, Path | Secret) else plain)


def type_text(annotation: Any) -> str:
    """Describe an annotation in words, such as `list of text`."""
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
    """Value as plain data; None if the configuration has none."""
    origin: str
    type: str
    default: str
    text: str
    component: str = ""
    """Name and help text of the component that reads the key; empty for keys of the core."""


def explain(key: str, composed: Composed) -> Explained:
    """Explain a key of a configuration. Raises ConfigError for an unknown key."""
    path, catalogue = key.split("."), composed.catalogue
    value, origin = _value(composed.config.dump(), path), str(composed.origin_of(key))
    kind, of_plugins = BY_TABLE.get(path[0]), catalogue.tables()
    tables = table_keys() | {name: list(model.model_fields) for name, model in of_plugins.items()}
    if own := of_plugins.get(path[0]):
        found = catalogue.find("table", path[0])
        says = f"table {found.title}: {found.component.help}"
        value = _value({path[0]: composed.config.table(own).model_dump(mode="json", exclude_none=True)}, path)
        if len(path) == 1:
            return Explained(key, value, origin, "table", "", summary(own), says)
        return _documented(key, path[1:], own, value, origin, says, tables)
    if kind is None:
        return _documented(key, path, Core, value, origin, "", tables)
    rest = path[1 + kind.many :]
    index = int(path[1]) if kind.many and len(path) > 1 and path[1].isdecimal() else 0
    chosen = getattr(composed.config, path[0])
    choices = chosen if kind.many else (chosen,) if chosen else ()
    if index >= len(choices):
        many = "s" if kind.many else ""
        return Explained(key, value, origin, "table", "", f"The {kind.name}{many}, by name; none is chosen.")
    name = choices[index].name
    found, target = catalogue.find(kind.name, name), catalogue.target(kind.name, name)
    says = f"{kind.name} {found.title}: {found.component.help}"
    if not rest or rest == ["name"]:
        documented = inspect.cleandoc(target.__doc__ or "")
        return Explained(
            key, value, origin, "text" if rest else "table", "", f"Name of the {kind.name}.", f"{says}\n{documented}"
        )
    of_core = keys_model(path[0])
    model, by = (of_core, "") if rest[0] in of_core.model_fields else (target.options_model(), says)
    return _documented(key, rest, model, value, origin, by, tables)


def _documented(
    key: str, path: list[str], model: Any, value: Any, origin: str, component: str, homes: Mapping[str, list[str]]
) -> Explained:
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
            everything = [*top_level_keys(), *homes] if len(path) == 1 and model is Core else known
            raise unknown_key(key, everything, homes)
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


def starter(
    values: Mapping[str, Mapping[str, Any]], reward: str, catalogue: Catalogue | None = None, *, full: bool = False
) -> str:
    """Return a commented configuration in TOML.

    `values`: values by table and key; `full`: all keys, unset as comments, with the tables of the catalogue's plugins.
    """
    lines = ["# A Relax run. `relax config explain KEY THIS_FILE` explains a key; commented lines show defaults."]
    lines += [] if full else ["# `relax init --full` writes all keys."]

    def comment(text: str) -> None:
        lines.extend(f"# {line}" for line in textwrap.wrap(text, WIDTH))

    for doc in (*core_documentation(), *(plugin_documentation(catalogue) if catalogue and full else ())):
        given, many = values.get(doc.name, {}), doc.many or doc.name.count(".")
        shown = {name for name in (*given, *IMPORTANT.get(doc.name, ())) if not many}
        if not (shown or full):
            continue
        lines.append("")
        if many:  # tables in tables and arrays of tables are written as comments
            comment(doc.text)
            lines.append(f"# [[{doc.name}]]" if doc.many else f"# [{doc.name}]")
            lines += [f"#   {field.name} = {field.default or '...'}  # {field.text}" for field in doc.fields]
            continue
        if doc.name:
            lines.append(f"[{doc.name}]  # {doc.text}")
        for field in (field for field in doc.fields if full or field.name in shown):
            comment(field.text)
            value = literal(given[field.name]) if field.name in given else field.default or f"...  # {field.type}"
            lines.append(f"{'' if field.name in shown else '# '}{field.name} = {value}")
        if not doc.name:
            lines.append("")
            comment("Components by name; `relax plugins list` shows all. Write a table instead to set options too.")
            for table in ("algorithm", "engine", "trainer", "environment"):
                lines.append(f"{'' if table == 'algorithm' else '# '}{table} = {literal(DEFAULT_NAMES[table])}")
            lines.append(f"rewards = [{literal(reward)}]")
    return "\n".join(lines) + "\n"


def reference(catalogue: Catalogue) -> str:
    """Return the configuration reference as Markdown: every key of the core and of the catalogue's components."""
    return "\n".join(_page(catalogue)).rstrip() + "\n"


def _page(catalogue: Catalogue) -> Iterator[str]:
    yield "# Configuration reference"
    for doc in (*core_documentation(), *plugin_documentation(catalogue)):
        yield from _section(doc, "##" if doc.name.count(".") == 0 else "###")
    for table, kind in BY_TABLE.items():
        yield from _section(component_documentation(table), "##")
        for name in catalogue.names(kind.name):
            offered = catalogue.find(kind.name, name)
            yield from ("", f"### `{name}`", "", f"{offered.component.help}. From `{offered.distribution}`.")
            try:
                model = catalogue.target(kind.name, name).options_model()
            except RelaxError as error:
                yield from ("", f"Its options could not be read: {error}.")
                continue
            first, *rest = table_docs(table, model)
            if text := summary(model):
                yield from ("", text)
            yield from _rows(first.fields)
            for doc in rest:
                yield from _section(doc, "####")


def _section(doc: TableDoc, level: str) -> Iterator[str]:
    brackets = f"[[{doc.name}]]" if doc.many else f"[{doc.name}]"
    yield from ("", f"{level} `{brackets}`" if doc.name else f"{level} Top level")
    if doc.text:
        yield from ("", doc.text)
    yield from _rows(doc.fields)


def _rows(fields: Sequence[FieldDoc]) -> Iterator[str]:
    if not fields:
        return
    yield from ("", "| key | type | default | |", "|---|---|---|---|")
    for field in fields:
        default = "required" if field.required else f"`{field.default}`" if field.default else ""
        yield f"| `{field.name}` | {_cell(field.type)} | {_cell(default)} | {_cell(field.text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def schema(catalogue: Catalogue) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON schema, and a note for each component that it leaves out."""
    notes: list[str] = []
    definitions: dict[str, Any] = {}
    core = _inlined(Core, "core", definitions)
    properties: dict[str, Any] = core["properties"]
    mode = properties["placement"]
    properties["placement"] = {"anyOf": [{"type": "string", "enum": ["colocate", "hybrid", "async"]}, mode]}
    for table, kind in BY_TABLE.items():
        properties[table] = _table(kind, catalogue, definitions, notes)
    for name, model in catalogue.tables().items():
        properties[name] = _inlined(model, f"table.{name}", definitions)
    definitions["core.EngineTable"]["properties"]["engine"] = properties["engine"]
    core["required"] = [key for key in core.get("required", []) if key in ("model", "data")]
    return {"$schema": DIALECT, **core, "title": "Relax run configuration", "$defs": definitions}, notes


def _table(kind: Kind, catalogue: Catalogue, definitions: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    forms: list[dict[str, Any]] = []
    names: list[str] = []
    for name in catalogue.names(kind.name):
        try:
            form = _schema_component(kind, name, catalogue, definitions)
        except RelaxError as error:
            notes.append(f"{kind.name} {name} is left out: {error}")
            continue
        forms.append(form)
        names.append(name)
    one = {"anyOf": [{"type": "string", "enum": names}, *forms]} if names else {"type": ["string", "object"]}
    return {"type": "array", "items": one} if kind.many else one


def _schema_component(kind: Kind, name: str, catalogue: Catalogue, definitions: dict[str, Any]) -> dict[str, Any]:
    model = catalogue.target(kind.name, name).options_model()
    options = _inlined(model, f"{kind.name}.{name}", definitions)
    keys = _inlined(keys_model(kind.table), f"{kind.table}.keys", definitions)
    chosen = {"name": {"const": name, "description": catalogue.find(kind.name, name).component.help}}
    needed = [] if name in (DEFAULT_NAMES.get(kind.table), DEFAULT_SANDBOX) else ["name"]
    return {
        "type": "object",
        "title": name,
        "properties": {**chosen, **keys.get("properties", {}), **options.get("properties", {})},
        "required": [*needed, *options.get("required", [])],
        "additionalProperties": False,
    }


def _inlined(model: Any, prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the model's schema, and move its definitions to `definitions` under names with a prefix."""
    own: dict[str, Any] = model.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    moved: Mapping[str, Any] = own.pop("$defs", {})
    definitions.update({f"{prefix}.{name}": definition for name, definition in moved.items()})
    return own
