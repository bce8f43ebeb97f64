# SPDX-License-Identifier: Apache-2.0
"""One key of a configuration explained: its value, where it is from, what it means, who reads it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from relax_core.api.component import BY_TABLE
from relax_core.api.errors import ConfigError
from relax_core.config.annotation import models_in
from relax_core.config.choice import keys_model
from relax_core.config.compose import Composed
from relax_core.config.documentation import field_doc, summary
from relax_core.config.problems import unknown_key
from relax_core.config.run_config import Core, table_keys, top_level_keys
from relax_core.registry.catalogue import Catalogue


@dataclass(frozen=True, slots=True)
class Explained:
    """What is known of one key."""

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
    value, origin = _value(composed.config.dump(), path), str(composed.origins.of(key))
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
