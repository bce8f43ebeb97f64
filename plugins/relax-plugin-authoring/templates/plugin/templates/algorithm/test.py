"""Contract tests of `{{ cookiecutter.name }}`: shapes, masks, gradients, and a loss independent of the batch's split."""

from relax_core.testing.algorithm import AlgorithmSuite

from {{ cookiecutter.package }}.algorithm import {{ cookiecutter.class_name }}


class TestConformance(AlgorithmSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    stops_gradients = False  # set True if the loss detaches tensors on purpose, which finite differences can't check
{%- endif %}
