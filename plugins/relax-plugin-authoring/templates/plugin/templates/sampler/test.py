"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %}, and a test of its choice{% endif %}."""

from relax_core.testing.sampler import SamplerSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(SamplerSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    generic = True  # name the columns that the sampler reads in `columns`, then remove this line
{%- else %}


def test_unsolved_tasks_are_repeated_until_they_are_solved():
    sampler = {{ cookiecutter.class_name }}({{ cookiecutter.class_name }}.options_model()(share=1.0))
    sampler.learned(0, 3, [0.0, 0.5])
    assert {sampler.pick(group, 1000, 7) for group in range(20)} == {3}
    sampler.learned(1, 3, [0.0, 1.0])
    assert len({sampler.pick(group, 1000, 7) for group in range(20)}) > 10
{%- endif %}
