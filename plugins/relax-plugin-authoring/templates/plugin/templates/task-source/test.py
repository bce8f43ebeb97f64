"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %}, and tests of bad files{% endif %}."""

{% if not cookiecutter.moved -%}
import json
from pathlib import Path

import pytest

from relax_core.api import ConfigError
{% endif -%}
from relax_core.testing.task_source import TaskSourceSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(TaskSourceSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    generic = True  # unless the source reads .jsonl files, write `store` for your format, then remove this line
{%- else %}

    @classmethod
    def store(cls, rows, directory):
        """Write `rows` in the source's format; return the path."""
        path = Path(directory) / "tasks.toml"
        lines = ["[[tasks]]\n" + "".join(f"{name} = {json.dumps(row[name])}\n" for name in row) for row in rows]
        path.write_text("\n".join(lines))
        return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[[tasks]]\nanswer = 1\n", "task 1: no text prompt"), ("", "no tasks"), ("[[tasks", "tasks.toml: Expected")],
)
def test_a_bad_file_is_refused_with_its_reason(text, said, tmp_path):
    path = tmp_path / "tasks.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        {{ cookiecutter.class_name }}().open(str(path), {})
{%- endif %}
