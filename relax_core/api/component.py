# SPDX-License-Identifier: Apache-2.0
"""What a plugin offers: `Component` names a target, `Configurable` is the base of every target class.

A component is strings only, so that listing a hundred plugins imports none of them.
The options model of a class is its generic parameter: `class Mine(Reward[MyOptions])`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, cast, get_args, get_origin

from typing_extensions import TypeVar

if TYPE_CHECKING:
    from relax_core.api.options import Options

OptionsT = TypeVar("OptionsT", default=Any)


@dataclass(frozen=True, slots=True)
class Component:
    """One named thing of one kind in a plugin."""

    name: str
    """Kebab-case and unique per kind; users write it in their TOML."""
    target: str
    """Where the class is: `package.module:Class`. Imported only when chosen."""
    help: str
    """One line for `relax plugins list`."""
    experimental: bool = False


class Configurable(Generic[OptionsT]):
    """Base of every component class; keeps the typed options it was built from."""

    kind: ClassVar[str] = ""

    def __init__(self, options: OptionsT | None = None) -> None:
        self.options: OptionsT = options if options is not None else cast(OptionsT, self.options_model()())

    @classmethod
    def options_model(cls) -> type[Options]:
        """The pydantic model named as generic parameter; `Options` (no options) where none is named."""
        return _named_model(cls) or _empty_model()


def _named_model(cls: type) -> type[Options] | None:
    for base in cls.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            for argument in get_args(generic):
                if get_origin(generic) is not Generic and isinstance(argument, type):
                    return argument
    return None


def _empty_model() -> type[Options]:
    from relax_core.api.options import Options

    return Options
