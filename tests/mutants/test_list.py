# SPDX-License-Identifier: Apache-2.0
"""The list of mutants fits the code: each line stands once in its file, each change is one, and its tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_has_tests_that_should_see_it(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text()
    assert text.count(mutant.line) == 1
    assert mutant.changed != mutant.line
    assert [name for name in mutant.tests.split() if not (ROOT / name).exists()] == []


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
