"""Contract tests of `{{ cookiecutter.name }}`: tensors arrive unchanged, and every corruption of a publish is refused."""

from relax_core.testing.weight_transport import WeightTransportSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(WeightTransportSuite):
    component = {{ cookiecutter.class_name }}
