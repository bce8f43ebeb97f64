"""Contract tests of `{{ cookiecutter.name }}`, and a test of its rewards."""

from relax_core.api import Task
from relax_core.testing.environment import EnvironmentSuite

from {{ cookiecutter.package }}.environment import {{ cookiecutter.class_name }}


class TestConformance(EnvironmentSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    generic = True  # the tasks and turns below are placeholders: replace them by your own, then remove this line
{%- endif %}
    tasks = (Task("one", "Say a number.", "4"), Task("two", "Say a number.", "5"))
    turns = ("3", "4", "5")
{%- if not cookiecutter.moved %}


def test_sooner_is_worth_more() -> None:
    made = {{ cookiecutter.class_name }}()
    first, second = TestConformance.played(made)
    assert (first[-1][2], second[-1][2]) == (1 / 2, 1 / 3)
{%- endif %}
