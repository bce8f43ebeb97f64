# SPDX-License-Identifier: Apache-2.0
"""The folder of an evaluation's result: written whole, read back, and refused by name if the file is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from relax_plugin_workbench.eval_result import EvalResult, is_result, read_result, result_folder

from relax_core.api.errors import ConfigError
from relax_core.observe.redaction import Redactor

SET = {"set": "aime", "step": 4, "temperature": 1.0, "mean": 0.5, "count": 2, "metrics": {}, "tasks": {"a": [0.0, 1.0]}}


def test_a_result_is_read_as_it_was_written_without_secrets(tmp_path: Path) -> None:
    result = EvalResult("run", 4, 3, (SET,), tmp_path / "new" / "result")
    result.write("name = 'hidden'", [{"response": "it is hidden"}, {"response": "b"}], Redactor(["hidden"]))
    assert is_result(result.directory) and read_result(result.directory) == result
    assert "hidden" not in (result.directory / "config.toml").read_text()
    lines = (result.directory / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 2 and "hidden" not in lines[0]


@pytest.mark.parametrize(
    "text", ["{}", '{"schema": "relax.eval/9"}', '{"schema": "relax.eval/1", "sets": [3]}', "[]", "x"]
)
def test_a_damaged_result_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "eval.json").write_text(text)
    with pytest.raises(ConfigError, match=r"eval\.json"):
        read_result(tmp_path)


def test_a_result_never_overwrites_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert result_folder(None, "run") == tmp_path / "evals" / "run"
    (tmp_path / "evals" / "run").mkdir(parents=True)
    assert result_folder(None, "run") == tmp_path / "evals" / "run-2"
    (tmp_path / "evals" / "run" / "file").touch()
    with pytest.raises(ConfigError, match="which exists"):
        result_folder(tmp_path / "evals" / "run", "run")
