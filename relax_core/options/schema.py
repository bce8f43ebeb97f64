# SPDX-License-Identifier: Apache-2.0
"""The configuration's JSON schema for editors: core tables, and the options of every installed component.

A component that can't be imported here is left out and named in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_core.api.errors import RelaxError
from relax_core.api.kinds import BY_TABLE, Kind
from relax_core.options.choice import DEFAULT_NAMES, keys_model
from relax_core.options.run_config import Core
from relax_core.plugins.catalogue import Catalogue

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
            form = _component(kind, name, catalogue, definitions)
        except RelaxError as error:
            notes.append(f"{kind.name} {name} is left out: {error}")
            continue
        forms.append(form)
        names.append(name)
    one = {"anyOf": [{"type": "string", "enum": names}, *forms]} if names else {"type": ["string", "object"]}
    return {"type": "array", "items": one} if kind.many else one


def _component(kind: Kind, name: str, catalogue: Catalogue, definitions: dict[str, Any]) -> dict[str, Any]:
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
