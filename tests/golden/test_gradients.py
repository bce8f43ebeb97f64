# SPDX-License-Identifier: Apache-2.0
"""No algorithm is GRPO under another name: on a shared batch its gradient points elsewhere, and the docs show how far."""

import json

import pytest

from tests.golden.gradients import FILE, NAMES, SAME_ON_POLICY, beside


@pytest.mark.parametrize("name", NAMES)
def test_its_gradient_is_not_grpos_and_is_what_the_docs_show(name):
    """The direction differs, not only the size, which an optimizer may not even see."""
    found, recorded = beside(name), json.loads(FILE.read_text(encoding="utf-8"))[name]
    assert found["off_policy"]["cosine"] < 0.99
    assert (found["on_policy"]["cosine"] > 1 - 1e-9) == (name in SAME_ON_POLICY)
    for key, told in found.items():
        assert told == pytest.approx(recorded[key], abs=1e-5), "python -m tests.golden.gradients, docs/generate.py"
