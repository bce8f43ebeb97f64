"""Tests of `relax {{ cookiecutter.name }}`."""

import json

from {{ cookiecutter.package }}.command import {{ cookiecutter.function }}


def test_the_mean_is_over_the_last_steps(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("")
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate((0.0, 0.5, 1.0), 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    {{ cookiecutter.function }}(str(tmp_path), steps=2, json=True)
    assert json.loads(capsys.readouterr().out) == {"run": tmp_path.name, "steps": 2, "mean": 0.75}
