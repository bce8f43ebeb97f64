# SPDX-License-Identifier: Apache-2.0
"""The configuration reference as Markdown, made from the models: core tables, then every component that imports here.

The configuration's JSON schema for editors: core tables, and the options of every installed component.

A component that can't be imported here is left out and named in the notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax_core.api.component import BY_TABLE, Kind
from relax_core.api.errors import RelaxError
from relax_core.config.documentation import (
    FieldDoc,
    TableDoc,
    component_documentation,
    core_documentation,
    summary,
    table_docs,
)
from relax_core.config.run_config import DEFAULT_NAMES, Core, keys_model
from relax_core.registry.catalogue import Catalogue


def reference(catalogue: Catalogue | None = None) -> str:
    """The whole page; without a catalogue, the core's part of it."""
    return "\n".join(_page(catalogue)).rstrip() + "\n"


def _page(catalogue: Catalogue | None) -> Iterator[str]:
    yield "# Configuration reference"
    for doc in core_documentation():
        yield from _section(doc, "##" if doc.name.count(".") == 0 else "###")
    for table in BY_TABLE:
        yield from _section(component_documentation(table), "##")
        for name in catalogue.names(BY_TABLE[table].name) if catalogue else ():
            yield from _component(catalogue, table, name)


def _component(catalogue: Catalogue | None, table: str, name: str) -> Iterator[str]:
    if catalogue is None:
        return
    kind = BY_TABLE[table].name
    found = catalogue.find(kind, name)
    yield from ("", f"### `{name}`", "", f"{found.component.help}. From `{found.distribution}`.")
    try:
        model = catalogue.target(kind, name).options_model()
    except RelaxError as error:
        yield from ("", f"Its options are not known here: {error}.")
        return
    docs = list(table_docs(name, model))
    if text := summary(model):
        yield from ("", text)
    yield from _rows(docs[0].fields)
    for doc in docs[1:]:
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


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(catalogue: Catalogue) -> tuple[dict[str, Any], list[str]]:
    """The schema, and a note for every component that is not in it."""
    notes: list[str] = []
    definitions: dict[str, Any] = {}
    core = _inlined(Core, "core", definitions)
    properties: dict[str, Any] = core["properties"]
    mode = properties["placement"]
    properties["placement"] = {"anyOf": [{"type": "string", "enum": ["colocate", "hybrid", "async"]}, mode]}
    for table, kind in BY_TABLE.items():
        properties[table] = _table(kind, catalogue, definitions, notes)
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
    needed = [] if DEFAULT_NAMES.get(kind.table) == name else ["name"]
    return {
        "type": "object",
        "title": name,
        "properties": {**chosen, **keys.get("properties", {}), **options.get("properties", {})},
        "required": [*needed, *options.get("required", [])],
        "additionalProperties": False,
    }


def _inlined(model: Any, prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The model's schema, its definitions moved to the root under a prefix."""
    own: dict[str, Any] = model.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    moved: Mapping[str, Any] = own.pop("$defs", {})
    definitions.update({f"{prefix}.{name}": definition for name, definition in moved.items()})
    return own
