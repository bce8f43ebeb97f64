# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a configuration: every problem at once, each with its key, its file and its fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from relax_core.api.component import BY_TABLE
from relax_core.api.errors import ConfigError
from relax_core.api.secret import LITERAL
from relax_core.config.annotation import annotation_at, holds_secret, models_in
from relax_core.config.tree import DEFAULT, Leaf, Node, Origin, leaves
from relax_core.registry.suggestions import did_you_mean, nearest


class ConfigProblems(ConfigError):
    """Several at once; `errors` has them one by one."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.got, first.fix)
        self.errors = tuple(errors)
        self.args = (f"{len(errors)} problems in the configuration\n" + "\n".join(f"  {error}" for error in errors),)


def refuse(errors: Iterable[ConfigError]) -> None:
    """Raise what there is: one error as it is, several together, nothing where there is none."""
    found = list({str(error): error for error in errors}.values())
    if found:
        raise found[0] if len(found) == 1 else ConfigProblems(found)


def located(error: ConfigError, tree: Node) -> ConfigError:
    """The same error with the place where its key was written."""
    origin = origin_at(tree, error.field)
    return error if origin == DEFAULT else ConfigError(f"{error.field} ({origin})", error.got, error.fix)


def origin_at(tree: Node, key: str) -> Origin:
    """Where a key was written; for a table its first line, for an absent key `default`."""
    node: Node | None = tree
    for part in key.split("."):
        if isinstance(node, Leaf):
            return node.origin
        if isinstance(node, list):
            node = node[int(part)] if part.isdecimal() and int(part) < len(node) else None
        elif node is not None:
            node = node.get(part)
    first = next(leaves(node), None) if node is not None else None
    return first[1].origin if first else DEFAULT


def validation_errors(
    error: ValidationError, model: type[BaseModel], prefix: str = "", also: Iterable[str] = ()
) -> list[ConfigError]:
    """Pydantic's errors as ours; `also` are further keys that are known where the model stands."""
    merged: dict[str, ConfigError] = {}
    for detail in error.errors(include_url=False):
        found = _translated(detail, model, prefix, tuple(also))
        known = merged.get(found.field)
        both = ConfigError(found.field, found.got, f"{known.fix}, or {found.fix}") if known else found
        merged[found.field] = found if known and known.fix == found.fix else both
    return list(merged.values())


def unknown_key(key: str, known: Iterable[str], tables: Mapping[str, Iterable[str]]) -> ConfigError:
    """A key that nobody reads: what is near, where else it stands, or all there is."""
    table, _, name = key.rpartition(".")
    candidates = sorted(known)
    homes = [f"[{home}]" for home, keys in tables.items() if name in keys and home != table]
    fix = did_you_mean(name, candidates)
    close = nearest(name, candidates)
    if homes and not close:
        fix = f"{name} is a key of {' and '.join(homes)}"
    if not table and not close:
        shown = ", ".join(f"[[{t}]]" if t in BY_TABLE and BY_TABLE[t].many else f"[{t}]" for t in tables)
        fix = f"{fix}; the tables are {shown}"
    return ConfigError(key, "an unknown key", fix)


def _translated(detail: ErrorDetails, model: type[BaseModel], prefix: str, also: tuple[str, ...]) -> ConfigError:
    path = _path(detail, model)
    key = ".".join((*((prefix,) if prefix else ()), *path))
    if detail["type"] == "extra_forbidden":
        owners = models_in(annotation_at(model, path[:-1]))
        known = [name for owner in owners for name in owner.model_fields]
        return unknown_key(key, [*known, *(also if len(path) == 1 else ())], _core_tables())
    if detail["type"] == "missing":
        return ConfigError(key, "nothing", _missing(model, path))
    hidden = detail["type"] == LITERAL or holds_secret(annotation_at(model, path))
    got = "a value that is not shown" if hidden else _shown(detail["input"])
    return ConfigError(key, got, _uncapped(detail["msg"].removeprefix("Value error, ")))


def _path(detail: ErrorDetails, model: type[BaseModel]) -> tuple[str, ...]:
    """The key path; pydantic adds the names of a union's members, which are no keys."""
    path: tuple[str, ...] = ()
    for part in map(str, detail["loc"]):
        if annotation_at(model, (*path, part)) is None and detail["type"] != "extra_forbidden":
            break
        path = (*path, part)
    return path


def _missing(model: type[BaseModel], path: tuple[str, ...]) -> str:
    for owner in models_in(annotation_at(model, path[:-1])):
        if (field := owner.model_fields.get(path[-1])) is None:
            continue
        required = [f"{name} = ..." for table in models_in(field.annotation) for name in _required(table)]
        if required:
            return f"write [{'.'.join(path)}] with {', '.join(required)}"
        return f"write it: {_uncapped(' '.join((field.description or 'it is required').split())).rstrip('.')}"
    return "it is required"


def _required(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if field.is_required()]


def _uncapped(text: str) -> str:
    return text[:1].lower() + text[1:]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _core_tables() -> dict[str, list[str]]:
    from relax_core.config.run_config import table_keys

    return table_keys()
