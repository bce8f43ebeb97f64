# SPDX-License-Identifier: Apache-2.0
"""A check fails a template's code once it breaks a promise, and the report of `relax plugins check` names the check."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.registry import Catalogue
from relax_core.registry.templates import bake
from tests.graph.conftest import Relax

SAME = "the_same_input_gives_the_same_result"
FAULTS = {
    "reward": {
        "WrongType": ("return float(", "return str(", "scores_are_finite_numbers"),
        "Blocking": ("lines = ", "__import__('time').sleep(3600)\n        lines = ", SAME),
        "ByChance": ("return float(", "return __import__('random').random() + float(", SAME),
    },
    "environment": {
        "WrongType": ('return Step("Wrong, try again.", done=False)', 'return "Wrong"', SAME),
        "ByChance": ("reward=1.0 / self.tries", "reward=__import__('random').random()", SAME),
    },
    "algorithm": {
        "WrongType": ("learn.group_mean(groups.rewards, groups.valid)", "0.0", SAME),
        "ByChance": ("return learn.", "return __import__('torch').rand(()) * learn.", SAME),
    },
}
"""By kind and class: text of the template, the text in its place, and the check that must fail.

One component that blocks is enough: the base of all suites waits for components, and the wait takes its whole deadline.
"""
NAMES = {"WrongType": "wrong-type", "Blocking": "blocking", "ByChance": "by-chance"}


def with_mutants(kind: str, folder: Path) -> str:
    """Return the template's code followed by each mutant of it."""
    project = bake(kind, f"sound-{kind}", folder)
    code = (project / f"src/relax_plugin_sound_{kind}" / f"{kind}.py").read_text()
    copies = [code]
    for name, (old, new, _) in FAULTS[kind].items():
        assert old in code
        mutant = code.replace(old, new).replace(f"Sound{kind.title()}", f"{kind.title()}{name}")
        copies.append(mutant.replace("from __future__ import annotations\n", ""))  # allowed only once, at the top
    return "\n\n".join(copies)


@pytest.mark.process
def test_plugins_check_fails_mutants_of_templates_by_name_and_not_the_templates(
    relax_here: Relax, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("reward", "environment")
    (tmp_path / "mutants.py").write_text("\n\n".join(with_mutants(kind, tmp_path) for kind in kinds))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p tests.authors.quick_suites")

    done = relax_here("plugins", "check", "mutants.py", "--json")
    assert done.code == 3, done.err
    checks = done.json["checks"]
    mutants = {f"{kind} {kind}-{NAMES[name]}": found for kind in kinds for name, (*_, found) in FAULTS[kind].items()}
    templates = {f"{kind} sound-{kind}" for kind in kinds}
    assert {check["subject"] for check in checks if check["name"] == "is_of_its_kind"} == {*mutants, *templates}
    failed = {(check["subject"], check["name"]) for check in checks if check["verdict"] == "failed"}
    assert {subject for subject, _ in failed} == mutants.keys()
    assert mutants.items() <= failed
    assert any(check in done.err for _, check in failed)


def test_the_suite_of_algorithms_fails_mutants_of_the_template_and_not_the_template(tmp_path: Path) -> None:
    """In this process: importing torch in the three processes of a check takes longer than all other checks here."""
    from relax_core.testing.algorithm import AlgorithmSuite

    file = tmp_path / "mutants.py"
    file.write_text(with_mutants("algorithm", tmp_path))
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
