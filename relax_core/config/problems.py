# SPDX-License-Identifier: Apache-2.0
"""Errors of a configuration, reported all at once; each names its key, its file and line, and its fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from relax_core.api.component import BY_TABLE
from relax_core.api.errors import ConfigError
from relax_core.api.options import LITERAL
from relax_core.config.annotation import annotation_at, holds_secret, models_in
from relax_core.config.layers import DEFAULT, Node, origin_at
from relax_core.config.other_names import hint
from relax_core.registry.error_text import did_you_mean, nearest

HIDDEN = "(hidden)"
RENAMED = {
    "autoscale.min_engines": "placement.rollout.min_engines",
    "export.push_to": "hub.push_to",
    "export.push_timeout_s": "hub.timeout_s",
    "rollout.prompts_per_step": "rollout.groups_per_step",
}
"""Former name of a key -> present name, which the error for a former name gives."""


class ConfigProblems(ConfigError):
    """Several errors of one configuration, listed in `errors`."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.got, first.fix)
        self.errors = tuple(errors)
        self.args = (f"{len(errors)} problems in the configuration\n" + "\n".join(f"  {error}" for error in errors),)


def refuse(errors: Iterable[ConfigError], tree: Node) -> None:
    """Raise the errors, if there are any, with the origins of their keys; raise several errors as ConfigProblems."""
    problems: dict[str, ConfigError] = {}
    for error in errors:
        origin = origin_at(tree, error.field)
        if origin != DEFAULT:
            error = ConfigError(f"{error.field} ({origin})", error.got, error.fix)
        problems[str(error)] = error
    if problems:
        raise next(iter(problems.values())) if len(problems) == 1 else ConfigProblems(list(problems.values()))


def validation_errors(
    error: ValidationError,
    model: type[BaseModel],
    tables: Mapping[str, Iterable[str]],
    prefix: str = "",
    also: Iterable[str] = (),
) -> list[ConfigError]:
    """Translate pydantic's errors. For hints on unknown keys: all `tables` with their keys, and further keys, `also`."""
    merged: dict[str, ConfigError] = {}
    for detail in error.errors(include_url=False):
        translated = _translated(detail, model, tables, prefix, tuple(also))
        earlier = merged.get(translated.field)
        if earlier and earlier.fix != translated.fix:  # the members of a union report one error each
            translated = ConfigError(translated.field, translated.got, f"{earlier.fix}, or {translated.fix}")
        merged[translated.field] = translated
    return list(merged.values())


def unknown_key(key: str, known: Iterable[str], tables: Mapping[str, Iterable[str]]) -> ConfigError:
    """Return the error for an unknown key: the fix names similar keys, tables with this key, or all known keys.

    For a key of another system, the fix names the key of Relax.
    """
    if key in RENAMED:
        return ConfigError(key, "a former key", f"rename it to {RENAMED[key]}")
    if elsewhere := hint(key):
        return ConfigError(key, "an unknown key", elsewhere)
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


def _translated(
    detail: ErrorDetails,
    model: type[BaseModel],
    tables: Mapping[str, Iterable[str]],
    prefix: str,
    also: tuple[str, ...],
) -> ConfigError:
    path: tuple[str, ...] = ()
    for part in map(str, detail["loc"]):
        if annotation_at(model, (*path, part)) is None and detail["type"] != "extra_forbidden":
            break  # pydantic adds the names of a union's members, which are not keys
        path = (*path, part)
    key = ".".join((*((prefix,) if prefix else ()), *path))
    if detail["type"] == "extra_forbidden":
        owners = models_in(annotation_at(model, path[:-1]))
        known = [name for owner in owners for name in owner.model_fields]
        return unknown_key(key, [*known, *(also if len(path) == 1 else ())], tables)
    if detail["type"] == "missing":
        return ConfigError(key, "nothing", _missing(model, path))
    annotation = annotation_at(model, path)
    astray = len(detail["loc"]) - len(path) > 1 and holds_secret(annotation)  # keys below the name of a union's member
    got = HIDDEN if detail["type"] == LITERAL or astray else shown(detail["input"], annotation)
    if len(got) > 80:
        got = f"{got[:77]}..."
    return ConfigError(key, got, _uncapped(detail["msg"].removeprefix("Value error, ")))


def shown(value: Any, annotation: Any) -> str:
    """Return a value as text; hide all parts that may be credentials, such as values under unknown keys."""
    if annotation is not None and not holds_secret(annotation):
        return repr(value)
    if isinstance(value, Mapping):
        items = [f"{key!r}: {shown(item, annotation_at(annotation, [str(key)]))}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return (
            f"[{', '.join(shown(item, annotation_at(annotation, [str(index)])) for index, item in enumerate(value))}]"
        )
    return HIDDEN


def _missing(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """Return the fix for a missing required key, or a missing table with required keys."""
    for owner in models_in(annotation_at(model, path[:-1])):
        if (field := owner.model_fields.get(path[-1])) is None:
            continue
        tables = models_in(field.annotation)
        required = [name for table in tables for name, own in table.model_fields.items() if own.is_required()]
        if required:
            return f"write [{'.'.join(path)}] with {', '.join(f'{name} = ...' for name in required)}"
        return f"write it: {_uncapped(' '.join((field.description or 'it is required').split())).rstrip('.')}"
    return "it is required"


def _uncapped(text: str) -> str:
    return text[:1].lower() + text[1:]
