# SPDX-License-Identifier: Apache-2.0
"""The driver plans with an algorithm's options, columns and denominators; torch is for those that compute."""

import subprocess
import sys

SCRIPT = """
import sys
from relax_core.registry import Catalogue
catalogue = Catalogue.load()
for name in catalogue.names("algorithm"):
    made = catalogue.target("algorithm", name)()
    assert made.columns() is not None and made.outputs() and made.denominators, name
print("torch" in sys.modules)
"""


def test_planning_with_any_algorithm_needs_no_torch():
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=True)
    assert said.stdout.strip() == "False"
