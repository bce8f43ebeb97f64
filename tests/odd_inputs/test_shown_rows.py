# SPDX-License-Identifier: Apache-2.0
"""`relax data check` shows the rendered prompt and the trained text of the first rows."""

from __future__ import annotations

import json
from pathlib import Path

from relax_plugin_workbench.data import SHOWN_CHARS
from typer.testing import CliRunner

from relax_core.cli.main import app
from tests.chat.tool_templates import open_family
from tests.odd_inputs.test_message_rows import TEMPLATES


def checked(folder: Path, *rows: dict[str, object], as_json: bool = False) -> str:
    open_family(folder, TEMPLATES["opens"], "<|im_end|>")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(folder), *(["--json"] if as_json else [])]
    return CliRunner().invoke(app, ["data", "check", str(folder / "rows.jsonl"), *options]).stdout


def test_the_first_rows_are_shown_as_they_are_rendered(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"q{number}"}]} for number in range(5)]
    shown = checked(tmp_path, *rows)
    assert "<|im_start|>user:q0<|im_start|>assistant:<think>⏎" in shown and "user:q1" in shown and "q2" not in shown
    (report,) = json.loads(checked(tmp_path, *rows, as_json=True))["files"]
    assert report["first"][1]["prompt"].endswith("q1<|im_start|>assistant:<think>\n")


def test_a_long_prompt_is_cut_in_its_middle(tmp_path: Path) -> None:
    shown = checked(tmp_path, {"prompt": [{"role": "user", "content": "x" * 5000}]})
    assert " ... " in shown and max(map(len, shown.splitlines())) < SHOWN_CHARS + 40


def test_a_supervised_row_shows_what_is_trained(tmp_path: Path) -> None:
    open_family(tmp_path, TEMPLATES["opens"], "<|im_end|>")
    row = {"prompt": [{"role": "user", "content": "q"}], "completion": "<think>so</think>42"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    document = 'algorithm = "sft"\nsteps = 1\n[model]\npath = "."\n[data]\ntrain = "rows.jsonl"\nmax_row_tokens = 64\n'
    (tmp_path / "my.toml").write_text(document)
    shown = CliRunner().invoke(app, ["data", "check", str(tmp_path / "my.toml")]).stdout
    assert "prompt   <|im_start|>user:q<|im_start|>assistant:<think>⏎\n" in shown
    assert "trained  so</think>42<|im_end|>\n" in shown
