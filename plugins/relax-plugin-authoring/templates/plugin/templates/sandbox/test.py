"""Contract tests of `{{ cookiecutter.name }}`: limits, files, the ends of programs, and isolation once the class declares it."""

from relax_core.testing.sandbox import SandboxSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(SandboxSuite):
    component = {{ cookiecutter.class_name }}
