# SPDX-License-Identifier: Apache-2.0
"""A baked project's own tests fail once its code breaks a promise: wrong type, blocking, by chance."""

import os
import subprocess
import sys

import pytest

from relax_core.registry.templates import bake

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
    "algorithm": {
        "wrong type": ("return Loss(", "return dict("),
        "blocking": ("ratio = ", "__import__('time').sleep(3600)\n        ratio = "),
        "by chance": (".exp()", ".exp() * __import__('torch').rand(())"),
    },
}
SAID = {
    "wrong type": ("return a number", "return a Step", "return Loss"),
    "blocking": ("blocks for ever",),
    "by chance": ("gave another result",),
}


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("kind", MUTANTS)
def test_a_mutant_of_the_template_fails_its_own_tests(kind, fault, tmp_path):
    project = bake(kind, "mutant", tmp_path)
    code = project / "src" / "relax_plugin_mutant" / f"{kind}.py"
    old, new = MUTANTS[kind][fault]
    assert old in code.read_text()
    code.write_text(code.read_text().replace(old, new))
    tests = project / "tests" / f"test_{kind}.py"
    tests.write_text(tests.read_text().replace("    component = ", "    deadline_s = 10.0\n    component = "))
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(project / "src")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "TestConformance", "tests"]
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(said in done.stdout for said in SAID[fault]), done.stdout
