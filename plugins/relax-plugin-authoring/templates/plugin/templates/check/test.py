"""Contract tests of `{{ cookiecutter.name }}`, and a test of its findings."""

import pytest

from relax_core.api import FirstStepFacts
from relax_core.testing.check import CheckSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(CheckSuite):
    component = {{ cookiecutter.class_name }}


@pytest.mark.parametrize(
    ("metrics", "state"), [({"reward/mean": 0.5}, "ok"), ({"reward/mean": 0.0}, "warning"), ({}, "not applicable")]
)
def test_a_step_without_a_reward_is_a_warning(metrics, state):
    (finding,) = {{ cookiecutter.class_name }}(FirstStepFacts({}, metrics, {}))
    assert finding.state == state
