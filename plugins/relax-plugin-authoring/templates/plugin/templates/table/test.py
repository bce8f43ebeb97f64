"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %}, and a test of its check of other tables{% endif %}."""

from relax_core.testing.table import TableSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(TableSuite):
    component = {{ cookiecutter.class_name }}
{%- if not cookiecutter.moved %}
    options = {"most_steps": 8}


def test_a_longer_run_is_refused_and_a_shorter_one_is_not():
    (problem,) = {{ cookiecutter.class_name }}(most_steps=3).problems({"steps": 4})
    assert problem.field == "steps" and "allows 3" in str(problem)
    assert list({{ cookiecutter.class_name }}(most_steps=4).problems({"steps": 4})) == []
{%- endif %}
