"""{{ cookiecutter.name }} conforms: shapes, masks, and a loss that no split of the batch changes."""

from relax_core.testing.algorithm import AlgorithmSuite

from {{ cookiecutter.package }}.algorithm import {{ cookiecutter.class_name }}


class TestConformance(AlgorithmSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    stops_gradients = False  # True where the loss detaches on purpose: finite differences say nothing then
{%- endif %}
