# SPDX-License-Identifier: Apache-2.0
"""The mutants of `mutants.toml`, each one fault that somebody could make, with the tests that must see it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    path: str
    """The file, from the root of the repository."""
    line: str
    """The text that is changed; it stands once in the file."""
    changed: str
    tests: str
    """Arguments of pytest that must fail."""


MUTANTS = tuple(Mutant(**entry) for entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutants"])
