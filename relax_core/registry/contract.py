# SPDX-License-Identifier: Apache-2.0
"""The contract between a component class and its kind: derived from the kind's base, nothing abstract left, options built.

`Configurable` has no abstract metaclass, so that authors may mix in what they like; the check is made once, here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relax_core.api.component import Configurable, Kind
from relax_core.api.errors import ConfigError
from relax_core.registry.suggestions import did_you_mean

if TYPE_CHECKING:
    from relax_core.api.options import Options


def missing_methods(cls: type) -> list[str]:
    """List methods that the base asks for and the class did not write."""
    return [name for name in dir(cls) if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]


def import_target(target: str) -> object:
    """Import the object that `package.module:Name` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def contract_violation(kind: Kind, target: object) -> str:
    """Say why this is no component of the kind; empty where it is one."""
    base = import_target(kind.base)
    if not isinstance(target, type):
        return f"its target is {type(target).__name__}, not a class; name a subclass of {kind.base}"
    if not issubclass(target, _family(base)):
        return f"{target.__name__} is no {kind.name}; derive it from {kind.base}"
    if missing := missing_methods(target):
        return f"{target.__name__} does not define {', '.join(missing)}; write what {kind.base} asks for"
    return ""


def _family(base: object) -> type:
    """The class that gives a kind its name: rewards have several bases with one root."""
    if not isinstance(base, type) or not issubclass(base, Configurable):
        raise TypeError(f"the table of kinds names {base!r}, which is no Configurable")
    return next(cls for cls in base.__mro__ if "kind" in vars(cls))


def build_options(model: type[Options], options: Mapping[str, Any], field: str) -> Options:
    """Build options from plain data; a ConfigError names `field.key`, what it got and the nearest that exists."""
    from pydantic import ValidationError

    try:
        return model.model_validate(dict(options))
    except ValidationError as failed:
        first, *rest = failed.errors(include_url=False)
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            fix = f"there is no such option; {did_you_mean(str(first['loc'][0]), model.model_fields)}"
        elif first["type"] == "missing":
            fix = "give it a value"
        else:
            message = first["msg"].removeprefix("Value error, ")
            fix = message[:1].lower() + message[1:]
        path = ".".join([field, *(str(part) for part in first["loc"])])
        got = "nothing" if first["type"] == "missing" else repr(first["input"])
        raise ConfigError(path, got, fix + (f" (and {len(rest)} more)" if rest else "")) from None
