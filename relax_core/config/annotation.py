# SPDX-License-Identifier: Apache-2.0
"""Functions that find the models, paths and secrets in a field's type annotation; they never read values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relax_core.api.options import Secret


@dataclass(frozen=True, slots=True)
class Located:
    """A mark on a text field whose value names a file."""

    means: Any
    """Annotation that Relax uses in place of the field's own, such as `Path`."""


PathText = Annotated[str, Located(Path)]
"""A path as text; empty: no file."""
PathOrText = Annotated[str, Located(str | Path)]
"""The path of a file, or the file's content itself."""


def annotation_of(field: FieldInfo) -> object:
    """Return a field's annotation; for a field with a `Located` mark, the annotation that the mark gives."""
    return next((mark.means for mark in field.metadata if isinstance(mark, Located)), field.annotation)


def types_in(annotation: Any) -> tuple[object, ...]:
    """Return the innermost types of an annotation, left to right: `(str, Path)` for `dict[str, Path]`."""
    arguments = get_args(annotation)
    if not arguments:
        return (annotation,)
    return tuple(kind for argument in arguments for kind in types_in(argument))


def models_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    return tuple(kind for kind in types_in(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel))


def holds_path(annotation: Any) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, Path) for kind in types_in(annotation))


def holds_secret(annotation: Any) -> bool:
    """Return True if the field is a secret, or a table that contains a secret at any depth."""
    inner = (annotation_of(field) for model in models_in(annotation) for field in model.model_fields.values())
    return Secret in types_in(annotation) or any(holds_secret(one) for one in inner)


def is_table(annotation: Any) -> bool:
    """Return True if the field is one model: a table of the configuration."""
    return bool(models_in(annotation)) and not is_tables(annotation)


def is_tables(annotation: Any) -> bool:
    """Return True if the field is a list of models: an array of tables."""
    return bool(models_in(annotation)) and get_origin(annotation) in (tuple, list)


def annotation_at(model: type[BaseModel], path: Sequence[str]) -> object:
    """Return the annotation of the value at a key path; None if no field has that path."""
    annotation: Any = model
    for key in path:
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        if loose := [one for one in members if one is Any or one is dict]:
            return loose[0]
        if tables := [one for one in members if get_origin(one) is dict]:
            annotation = get_args(tables[0])[1]
            continue
        if key.isdecimal() and (lists := [one for one in members if get_origin(one) in (tuple, list)]):
            annotation = get_args(lists[0])[0]
            continue
        fields = [owner.model_fields[key] for owner in models_in(annotation) if key in owner.model_fields]
        if not fields:
            return None
        annotation = annotation_of(fields[0])
    return annotation
