# SPDX-License-Identifier: Apache-2.0
"""The suite of algorithms fails the template's code once that breaks a promise.

`tests/unit/testing/test_template_mutants.py` shows it of the other templates, and `tests/unit/registry/test_cli.py` that the
report of `relax plugins check` names the check that failed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.registry import Catalogue
from relax_core.registry.templates import bake
from relax_core.testing.algorithm import AlgorithmSuite

MUTANTS = {
    "WrongType": ("learn.group_mean(groups.rewards, groups.valid)", "0.0"),
    "ByChance": ("return learn.", "return __import__('torch').rand(()) * learn."),
}
"""By class: text of the template, and the text in its place."""


def with_mutants(folder: Path) -> str:
    """Return the template's code followed by each mutant of it."""
    project = bake("algorithm", "sound-algorithm", folder)
    code = (project / "src/relax_plugin_sound_algorithm/algorithm.py").read_text()
    copies = [code]
    for name, (old, new) in MUTANTS.items():
        assert old in code
        mutant = code.replace(old, new).replace("SoundAlgorithm", f"Algorithm{name}")
        copies.append(mutant.replace("from __future__ import annotations\n", ""))  # allowed only once, at the top
    return "\n\n".join(copies)


def test_the_suite_of_algorithms_fails_mutants_of_the_template_and_not_the_template(tmp_path: Path) -> None:
    file = tmp_path / "mutants.py"
    file.write_text(with_mutants(tmp_path))
    catalogue = Catalogue.load([str(file)])

    def exercised(name: str) -> list[object]:
        suite = type("Mutant", (AlgorithmSuite,), {"component": catalogue.target("algorithm", name)})
        return [suite.exercise(suite.make()) for _ in range(2)]

    first, again = exercised("sound-algorithm")
    assert first == again
    first, again = exercised("algorithm-by-chance")
    assert first != again
    with pytest.raises(TypeError, match="give a tensor"):
        exercised("algorithm-wrong-type")
