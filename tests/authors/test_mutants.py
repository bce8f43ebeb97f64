# SPDX-License-Identifier: Apache-2.0
"""`relax plugins check` fails a template's code once it breaks a promise, and names the check that saw it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.registry.templates import bake
from tests.authors.conftest import Home

SAME = "the_same_input_gives_the_same_result"
FAULTS = {
    "reward": {
        "WrongType": ("return float(", "return str(", "scores_are_finite_numbers"),
        "Blocking": ("lines = ", "__import__('time').sleep(3600)\n        lines = ", SAME),
        "ByChance": ("return float(", "return __import__('random').random() + float(", SAME),
    },
    "environment": {
        "WrongType": ('return Step("Wrong, try again.", done=False)', 'return "Wrong"', SAME),
        "Blocking": ("self.tries += 1", "__import__('time').sleep(3600)", SAME),
        "ByChance": ("reward=1.0 / self.tries", "reward=__import__('random').random()", SAME),
    },
    "algorithm": {
        "WrongType": ("return Loss(", "return dict(", SAME),
        "Blocking": ("ratio = ", "__import__('time').sleep(3600)\n        ratio = ", SAME),
        "ByChance": (".exp()", ".exp() * __import__('torch').rand(())", SAME),
    },
}
NAMES = {"WrongType": "wrong-type", "Blocking": "blocking", "ByChance": "by-chance"}


@pytest.mark.parametrize("kind", FAULTS)
def test_mutants_of_a_template_fail_and_the_template_does_not(kind: str, home: Home, tmp_path: Path) -> None:
    project = bake(kind, "sound", tmp_path)
    code = (project / "src/relax_plugin_sound" / f"{kind}.py").read_text()
    copies = [code]
    for name, (old, new, _) in FAULTS[kind].items():
        assert old in code
        copies.append(code.replace(old, new).replace("Sound", name))
    (home.path / "mutants.py").write_text("\n\n".join(copies))

    done = home.relax("plugins", "check", "mutants.py", "--json")
    assert done.code == 3, done.err
    failed = {(check["subject"], check["name"]) for check in done.json["checks"] if check["verdict"] == "failed"}
    assert {subject for subject, _ in failed} == {f"{kind} {name}" for name in NAMES.values()}
    for name, (_, _, check) in FAULTS[kind].items():
        assert (f"{kind} {NAMES[name]}", check) in failed
    assert any(check in done.err for _, check in failed)
