# SPDX-License-Identifier: Apache-2.0
"""Keeps secrets out of everything that is written: the known values, keys that name one, and shapes that are one.

The run's own secrets are passed in as values when they are resolved; this module looks nothing up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "[redacted]"
_KEY = re.compile(r"(^|[_-])(secret|password|passwd|token|api_?key|authorization|credentials?)$", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{8,}=*"
    r"|(?<=://)[^/\s:@\"]+:[^/\s@\"]+(?=@)"
)
_SHORTEST = 4
"""Shorter values would blank ordinary words."""


class Redactor:
    """Replaces secrets in text and in nested mappings."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._known: re.Pattern[str] | None = None
        self._values: set[str] = set()
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Learn further values, as they stand and as JSON writes them."""
        for secret in secrets:
            if len(secret) >= _SHORTEST:
                self._values |= {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
        longest_first = sorted(self._values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """The text without known values and secret shapes."""
        return _SHAPES.sub(HIDDEN, self.known(text))

    def known(self, text: str) -> str:
        """The text without known values only, for data whose words must stay as they are."""
        return self._known.sub(HIDDEN, text) if self._known else text

    def value(self, value: Any) -> Any:
        """Any nested value without them; strings under keys such as `api_key` go too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._entry(str(key), inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.value(inner) for inner in value]
        return value

    def _entry(self, key: str, value: Any) -> Any:
        return HIDDEN if isinstance(value, str) and value and _KEY.search(key) else self.value(value)
