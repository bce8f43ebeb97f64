# SPDX-License-Identifier: Apache-2.0
"""The list of mutants fits the code: each line stands once in its file, each change is one, and its tests exist."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def test_each_mutant_can_be_made_and_has_tests_that_should_see_it() -> None:
    """One test for all mutants, since pytest needs milliseconds for each of hundreds of tests."""
    texts = {path: (ROOT / path).read_text() for path in {mutant.path for mutant in MUTANTS}}
    wrong = [
        mutant.name
        for mutant in MUTANTS
        if texts[mutant.path].count(mutant.line) != 1
        or mutant.changed == mutant.line
        or not all((ROOT / name).exists() for name in mutant.tests.split())
    ]
    assert wrong == []


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
