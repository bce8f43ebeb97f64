# SPDX-License-Identifier: Apache-2.0
"""A baked project's own tests fail once its code breaks a promise: wrong type, blocking, by chance.

`tests/authors/test_mutants.py` shows it of the template of algorithms.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from relax_core.registry.templates import bake

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("suites of suites")]
MUTANTS = {
    "reward": {
        "wrong type": ("return float(", "return str("),
        "blocking": ("lines = ", "__import__('time').sleep(3600)\n        lines = "),
        "by chance": ("return float(", "return __import__('random').random() + float("),
    },
    "environment": {
        "wrong type": ('return Step("Wrong, try again.", done=False)', 'return "Wrong"'),
        "blocking": ("self.tries += 1", "__import__('time').sleep(3600)"),
        "by chance": ("reward=1.0 / self.tries", "reward=__import__('random').random()"),
    },
}
SAID = {
    "wrong type": ("return a number", "return a Step"),
    "blocking": ("blocks for ever",),
    "by chance": ("gave another result",),
}


def suite_files() -> dict[str, str]:
    files: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        for kind, faults in MUTANTS.items():
            for fault, (old, new) in faults.items():
                name = f"{kind} {fault}".replace(" ", "-")
                project = bake(kind, name, Path(folder))
                (package,) = (project / "src").iterdir()
                (code,) = package.glob(f"{kind}.py")
                assert code.read_text().count(old)
                # The suite alone: the template's other tests call the component in pytest's own process, which a mutant blocks.
                tests = (project / "tests" / f"test_{kind}.py").read_text().partition("\n\n\ndef test_")[0] + "\n"
                if fault == "blocking":
                    tests = tests.replace("    component = ", "    deadline_s = 0.5\n    component = ")
                files[f"{package.name}/{kind}.py"] = code.read_text().replace(old, new)
                files[f"{path(kind, fault)}.py"] = tests
    return files


def path(kind: str, fault: str) -> str:
    return f"test_template_{kind}_{fault.replace(' ', '_')}"


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("kind", MUTANTS)
def test_a_mutant_of_the_template_fails_its_own_tests(failures, kind, fault):
    failed = failures(path(kind, fault))
    assert any(said in told for said in SAID[fault] for told in failed.values()), failed
