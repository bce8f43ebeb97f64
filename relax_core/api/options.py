# SPDX-License-Identifier: Apache-2.0
"""`Options`, the pydantic base class of every component's options, and `Secret`, the type of a credential.

Only this module of `api` imports pydantic. `relax_core.api.Options` imports the module on first use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from relax_core.api.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


class Options(BaseModel):
    """The options of a component: typed, frozen, keyword-only. A string under a field documents the field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        ser_json_inf_nan="constants",  # TOML allows inf and nan; pydantic's default would write them as null
    )


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
            return Path(where).expanduser().read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(self.reference, error.strerror, "name a file that can be read") from error

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
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": "^(env|file):.+$"}


def is_reference(text: str) -> bool:
    return any(text.startswith(scheme) and len(text) > len(scheme) for scheme in SCHEMES)


def _parse(text: str) -> Secret:
    from pydantic_core import PydanticCustomError

    if not is_reference(text):
        raise PydanticCustomError(LITERAL, 'write "env:NAME" or "file:PATH", never the secret itself')
    return Secret(text)
