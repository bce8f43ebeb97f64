# SPDX-License-Identifier: Apache-2.0
"""Redaction of secrets in everything that a run writes. The configuration passes resolved secrets to a `Redactor`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "[redacted]"
_KEY = re.compile(
    r"(^|[_-])(secret|password|passwd|token|api_?key|(access|private)_?key|authorization|credentials?|cookies?)$",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----(?:[^-]|-(?!----))+-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----"
    r"|(?:(?<=[Cc]ookie: )|(?<=[Cc]ookie:)|(?<=[Cc]ookie['\"]: ['\"])|(?<=[Cc]ookie['\"]:['\"]))[^\s=;'\"]+=[^\r\n'\"]*"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{8,}=*"
    r"|(?<=://)[^/\s:@\"]+:[^/\s@\"]+(?=@)"
)
_SHORTEST = 4
"""Smallest length of a redacted value; redacting shorter values would hide ordinary words."""


class Redactor:
    """Redaction of secrets in text and nested values: known values, strings under secret keys, and token formats."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._known: re.Pattern[str] | None = None
        self._values: set[str] = set()
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Add secret values to redact, as plain text and as JSON and Python escape them."""
        for secret in secrets:
            if len(secret) >= _SHORTEST:
                quoted = (repr(secret), json.dumps(secret), json.dumps(secret, ensure_ascii=False))
                self._values |= {secret, *(text[1:-1] for text in quoted)}
        longest_first = sorted(self._values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """Return the text without known secret values and strings in the format of an access token."""
        return _SHAPES.sub(HIDDEN, self.known(text))

    def known(self, text: str) -> str:
        """Return the text without known secret values. Keep strings that only have the format of a secret."""
        return self._known.sub(HIDDEN, text) if self._known else text

    def value(self, value: Any) -> object:
        """Return a nested value without secrets."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self.document(value)
        if isinstance(value, (list, tuple, set, frozenset)):
            return (tuple if isinstance(value, tuple) else list)(map(self.value, value))
        return value

    def document(self, values: Mapping[str, Any]) -> dict[str, object]:
        """Return nested values without secrets; strings under keys such as `api_key` are redacted whole."""

        def entry(key: str, value: Any) -> object:
            return HIDDEN if isinstance(value, str) and value and _KEY.search(key) else self.value(value)

        return {self.text(str(key)): entry(str(key), value) for key, value in values.items()}

    def __call__(self, _logger: Any, _method: str, event: Mapping[str, Any]) -> dict[str, object]:
        """Return a record without secrets, as a processor of structlog; the names in a record are fixed."""
        return {name: self.value(value) for name, value in event.items()}


def credentials(environment: Mapping[str, str]) -> list[str]:
    """Return the values of environment variables whose names look like credentials."""
    return [value for name, value in environment.items() if _KEY.search(name) and len(value) >= 2 * _SHORTEST]
