# SPDX-License-Identifier: Apache-2.0
"""Relative paths made absolute: each is relative to the file it was written in, those of the command line to its directory.

What is a path is said by the annotation. Where it allows text too, text with a `{` or a line break is no path.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from relax_core.options.annotation import annotation_of, holds_path, holds_secret, holds_text, models_in
from relax_core.options.tree import Leaf, Node, Origin


def rooted(node: Node, annotation: Any) -> Node:
    """The same tree with absolute paths."""
    if isinstance(node, list):
        return [rooted(item, annotation) for item in node]
    if isinstance(node, Leaf):
        return Leaf(_rooted_value(node.value, annotation, node.origin), node.origin)
    models = models_in(annotation)
    if not models:
        return {key: rooted(item, annotation) for key, item in node.items()}
    fields = {name: annotation_of(field) for model in models for name, field in model.model_fields.items()}
    return {key: rooted(item, fields[key]) if key in fields else item for key, item in node.items()}


def _rooted_value(value: Any, annotation: Any, origin: Origin) -> Any:
    if isinstance(value, list | tuple):
        return [_rooted_value(item, annotation, origin) for item in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if holds_secret(annotation) and value.startswith("file:"):
        return f"file:{absolute(value.removeprefix('file:'), origin)}"
    if not holds_path(annotation) or (holds_text(annotation) and ("{" in value or "\n" in value)):
        return value
    return absolute(value, origin)


def absolute(path: str, origin: Origin) -> str:
    """Links stay links: an interpreter of a virtual environment is found by its own path."""
    return os.path.abspath(origin.directory / Path(path).expanduser()) if path else path
