# SPDX-License-Identifier: Apache-2.0
"""The suites of algorithms, trainers and sandboxes fail the template's code once that breaks a promise.

`tests/unit/testing/test_template_mutants.py` shows it of the other templates, and `tests/unit/registry/test_cli.py` that the
report of `relax plugins check` names the check that failed.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_authoring.new_project import bake

from relax_core.registry import Catalogue
from relax_core.testing.algorithm import AlgorithmSuite
from relax_core.testing.direct_sandbox import DirectSandbox
from relax_core.testing.sandbox import LIMITS, SandboxSuite
from relax_core.testing.trainer import TrainerSuite, tiny_model
from relax_core.testing.trainer_fixture import make_rows

MUTANTS = {
    "WrongType": ("learn.group_mean(groups.rewards, groups.valid)", "0.0"),
    "ByChance": ("return learn.", "return __import__('torch').rand(()) * learn."),
}
"""By class: text of the template, and the text in its place."""


TRAINER = {
    "test_a_late_count_gives_the_same_gradient": ("parameter.grad.mul_(factor)", "parameter.grad"),
    "test_a_gradient_that_is_not_finite_is_not_applied": ("if not (update.finite and norm.isfinite())", "if False"),
    "test_continuing_from_a_checkpoint_is_bit_exact": ("| self._moments(), Path(directory)", ", Path(directory)"),
    "test_a_token_within_the_bound_is_trained": ("", ""),
}
"""By test that fails, text of the template and the text in its place; no text: no mutant, and the test passes."""


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


def mutant_of(kind: str, folder: Path, old: str, new: str) -> Any:
    """Return the class of a template, with a text of its code replaced."""
    file = bake(kind, "mine", folder) / f"src/relax_plugin_mine/{kind}.py"
    code = file.read_text()
    assert old in code
    file.write_text(code.replace(old, new))
    return Catalogue.load([str(file)]).target(kind, kind)


@pytest.mark.faults  # of half a minute of one processor
@pytest.mark.parametrize("test", TRAINER)
def test_the_suite_of_trainers_fails_mutants_of_the_template_and_not_the_template(tmp_path: Path, test: str) -> None:
    suite = type("Mutant", (TrainerSuite,), {"component": mutant_of("trainer", tmp_path, *TRAINER[test])})()
    folder = tiny_model(tmp_path / "model")
    with suite.running(folder) as trainer:
        first = suite.step(trainer, 0, make_rows()), suite.fingerprint(trainer, 1)
    with suite.running(folder) as trainer:
        has = {"folder": folder, "trainer": trainer, "first_step": first, "tmp_path": tmp_path}
        check = getattr(suite, test)
        given = {name: has[name] for name in inspect.signature(check).parameters}
        with nullcontext() if test == list(TRAINER)[-1] else pytest.raises(AssertionError):
            check(**given)


@pytest.mark.parametrize("old", ["", "if place.is_symlink()"])
def test_the_suite_of_sandboxes_fails_a_box_that_follows_links_and_not_the_template(tmp_path: Path, old: str) -> None:
    suite = type("Mutant", (SandboxSuite,), {"component": mutant_of("sandbox", tmp_path, old, old and "if False")})()
    box = DirectSandbox(suite.make(), LIMITS).open()
    with pytest.raises(pytest.fail.Exception, match="read 'link'") if old else nullcontext():
        suite.test_only_regular_files_of_the_box_are_reached(box=box)
