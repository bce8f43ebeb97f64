"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %}, and a test of its proposals{% endif %}."""

{% if not cookiecutter.moved -%}
from relax_core.testing.scaling_policy import BUSY, EVEN, IDLE, ScalingPolicySuite
{%- else -%}
from relax_core.testing.scaling_policy import ScalingPolicySuite
{%- endif %}

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(ScalingPolicySuite):
    component = {{ cookiecutter.class_name }}
{%- if not cookiecutter.moved %}


def test_the_pool_grows_while_the_trainer_waits_and_shrinks_while_the_rollout_is_ahead():
    made = {{ cookiecutter.class_name }}()
    targets = [{p.target for p in TestConformance.proposals(made, load) if p} for load in (EVEN, BUSY, IDLE)]
    assert targets == [set(), {EVEN.size + 1}, {EVEN.size - 1}]
{%- endif %}
