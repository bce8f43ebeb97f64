"""Contract tests of `{{ cookiecutter.name }}`, and a test of its scores."""

from relax_core.api import Task
from relax_core.testing.reward import RewardSuite

from {{ cookiecutter.package }}.reward import {{ cookiecutter.class_name }}
{% if not cookiecutter.moved %}
TASK = Task("capital", "Which city is the capital of France?", "Paris")

{% endif %}
class TestConformance(RewardSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    generic = True  # the samples below are placeholders: replace them by your own, then remove this line
    samples = ((Task("sum", "What is 2 + 2?", "4"), "4"), (Task("sum", "What is 2 + 2?", "4"), "5"))
{%- else %}
    samples = ((TASK, "I think that it is\nParis"), (TASK, "Lyon"))
    best = 0


def test_case_counts_where_it_is_asked_for() -> None:
    strict = {{ cookiecutter.class_name }}({{ cookiecutter.class_name }}.options_model()(ignore_case=False))
    assert TestConformance.judged(strict, [(TASK, "paris"), (TASK, "Paris")]) == [0.0, 1.0]
{%- endif %}
