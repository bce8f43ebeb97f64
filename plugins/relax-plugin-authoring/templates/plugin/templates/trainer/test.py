"""Contract tests of `{{ cookiecutter.name }}` with a tiny Qwen3: exact gradients, bit-exact resumes, published weights."""

from relax_core.testing.trainer import TrainerSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(TrainerSuite):
    component = {{ cookiecutter.class_name }}
