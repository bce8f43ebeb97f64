# SPDX-License-Identifier: Apache-2.0
"""`Options`, the pydantic base class of every component's options, and `Secret`, the type of a credential.

Of the modules of `api`, only this one and `scaling_limits` import pydantic; `relax_core.api` imports them on first use.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from relax_core.api.errors import ConfigError
from relax_core.api.files import read_text

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


LARGEST = 3.4e38
"""Largest number of the configuration: that of float32, in which models compute."""
SMALLEST = 1e-30
"""Smallest number above 0: the logits divided by a smaller temperature would not be finite in float32."""
LARGEST_INT = (1 << 63) - 1
LARGEST_OF_UNIT = {"_s": 1e9, "_mb": 1 << 40, "_kb": 1 << 40}
"""Largest value by the unit at the end of a key. The system's timers and limits refuse larger ones: 1e9 s are 31 years."""


class Options(BaseModel):
    """The options of a component: typed, frozen, keyword-only. A string under a field documents the field.

    Every number is finite and within the range of the machine's numbers; a field's own bounds are in its annotation.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> object:
        """Refuse a number that no part of a run could use."""
        if fault := _unbounded(value, str(info.field_name)):
            raise PydanticCustomError("bounded", fault)
        return value


class TableOptions(Options):
    """The base of a configuration table that a plugin owns; a string under a field documents the key.

    Every key has a default, because a configuration may leave out the table. `config.table(MyTable)` returns the table
    in a role, `event.table("my-table", MyTable)` in an observer of `RunOpened`.
    """

    kind: ClassVar[str] = "table"
    may_change: ClassVar[tuple[str, ...]] = ()
    """Keys that may change when a run is resumed; `("*",)`: all keys."""
    of_the_run: ClassVar[bool] = False
    """True: the table applies to the whole run, so that a stage may not set it, and the replay of a step ignores it."""

    def problems(self, config: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Return an error for each combination with other tables that cannot work; read no file and no secret.

        `config` is the whole configuration as plain data, with every default.
        """
        return ()

    @classmethod
    def options_model(cls) -> type[Self]:
        """Return the class itself: the keys of a table are its options."""
        return cls


def _unbounded(value: Any, name: str) -> str:
    """Return the fix for a number that is not finite, or far too large or small; empty for any other value.

    Numbers inside lists and tables need only be finite, since only the component knows their meaning.
    """
    if not _finite(value):
        return "give a finite number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    most = next((most for unit, most in LARGEST_OF_UNIT.items() if name.endswith(unit)), LARGEST)
    if isinstance(value, int):
        most = min(most, LARGEST_INT)
    if abs(value) > most:
        return f"give a number of at most {most:g}"
    return f"give 0, or a number of at least {SMALLEST:g}" if 0 < abs(value) < SMALLEST else ""


def _finite(value: Any) -> bool:
    """Return False for a number that is not finite, and for a list or table with one at any depth."""
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


SCHEMES = ("env:", "file:")
LITERAL = "secret_literal"
"""Type of the validation error for a secret written as a literal; never print the value of this error."""


def revealed(value: Any) -> Iterator[str]:
    """Yield the values of all readable secrets in plain data, so that the caller can redact them."""
    if isinstance(value, str) and is_reference(value):
        with contextlib.suppress(ConfigError):
            yield Secret(value).reveal()
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from revealed(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from revealed(part)


class Secret:
    """A reference to a credential: `env:NAME` or `file:PATH`; the object never holds the value."""

    __slots__ = ("reference",)

    def __init__(self, reference: str) -> None:
        if not is_reference(reference):
            raise ValueError('a secret is written "env:NAME" or "file:PATH", never as its value')
        self.reference = reference

    def reveal(self) -> str:
        """Read the value now. Raises ConfigError if the variable or file does not exist."""
        scheme, _, where = self.reference.partition(":")
        if scheme == "env":
            if where not in os.environ:
                raise ConfigError(self.reference, "an environment variable that is not set", f"export {where}")
            return os.environ[where]
        try:
            return read_text(Path(where).expanduser()).strip()
        except (OSError, UnicodeDecodeError) as error:
            got = getattr(error, "strerror", None) or "bytes that are not UTF-8"
            raise ConfigError(self.reference, got, "name a file that can be read") from error

    def __repr__(self) -> str:
        return f"Secret({self.reference!r})"

    def __str__(self) -> str:
        return self.reference

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.reference == self.reference

    def __hash__(self) -> int:
        return hash(self.reference)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        from pydantic_core import core_schema

        text = core_schema.no_info_after_validator_function(_parse, core_schema.str_schema())
        written = core_schema.plain_serializer_function_ser_schema(str)
        known = core_schema.is_instance_schema(cls)
        return core_schema.json_or_python_schema(
            json_schema=text, python_schema=core_schema.union_schema([known, text]), serialization=written
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, object]:
        return {"type": "string", "pattern": "^(env|file):.+$"}


def is_reference(text: str) -> bool:
    return any(text.startswith(scheme) and len(text) > len(scheme) for scheme in SCHEMES)


def _parse(text: str) -> Secret:
    from pydantic_core import PydanticCustomError

    if not is_reference(text):
        raise PydanticCustomError(LITERAL, 'write "env:NAME" or "file:PATH", never the secret itself')
    return Secret(text)
