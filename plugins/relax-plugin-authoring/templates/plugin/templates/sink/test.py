"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %}, which read the stored values back{% endif %}."""

{% if not cookiecutter.moved -%}
import json
from collections import defaultdict

{% endif -%}
from relax_core.testing.sink import SinkSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(SinkSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    # To check the stored values too, write `read_back`: it returns {metric key: {step: value}}.
{%- else %}

    @classmethod
    def read_back(cls, run_dir):
        """Return the stored values by metric key and step."""
        shown = defaultdict(dict)
        for line in (run_dir / "{{ cookiecutter.name }}.jsonl").read_text().splitlines():
            values = json.loads(line)
            step = values.pop("step")
            for key, value in values.items():
                assert step not in shown[key], f"{key} has step {step} twice"
                shown[key][step] = value
        return {key: dict(steps) for key, steps in shown.items()}
{%- endif %}
