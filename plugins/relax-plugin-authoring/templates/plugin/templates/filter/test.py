"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %}, and a test of its verdicts{% endif %}."""

from relax_core.testing.filter import FilterSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(FilterSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    generic = True  # set `task`, `responses` and `rewards` to groups of your tasks, then remove this line
{%- else %}


def test_easy_groups_are_dropped_and_others_are_kept():
    made = {{ cookiecutter.class_name }}()
    verdicts = [TestConformance.reason(made, rewards) for rewards in TestConformance.rewards]
    assert verdicts == ["", "", "too easy", "", ""]
{%- endif %}
