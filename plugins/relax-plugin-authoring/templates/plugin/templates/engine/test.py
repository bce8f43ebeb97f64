"""Contract tests of `{{ cookiecutter.name }}` with a tiny Qwen3: log-probs, seeds, aborts, and new weights amid requests."""

from relax_core.testing.engine import EngineSuite

from {{ cookiecutter.package }}.engine import {{ cookiecutter.class_name }}


class TestConformance(EngineSuite):
    component = {{ cookiecutter.class_name }}
    samples, prompts_at_once = 500, 20
