# SPDX-License-Identifier: Apache-2.0
"""A path on the command line is relative to the working directory, in processes that work in other folders too."""

import json
import os

import pytest
from relax_plugin_workbench import try_run
from relax_plugin_workbench.data_survey import data_files, shown_by
from typer.testing import CliRunner

from relax_core.cli.main import app


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plugin_of_relax_try_is_found_by_workers(here, monkeypatch):
    given = []

    async def note(name, options, data, plugins, label):
        given.extend(plugins)
        return []

    monkeypatch.setattr(try_run, "try_reward", note)
    result = CliRunner().invoke(app, ["try", "reward", "mine", "--plugin", "mine.py", "--data", "a.jsonl"])
    assert result.exit_code == 0 and given == [str(here / "mine.py")]


def test_a_program_of_relax_try_is_found_by_workers(here):
    (here / "agent.py").write_text("")
    (here / "python").write_text("")
    (command,) = [text for text in try_run.with_agent([], ["python", "agent.py", "--fast"]) if "command" in text]
    assert json.loads(command.partition("=")[2]) == ["python", str(here / "agent.py"), "--fast"]


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.json"])
def test_media_of_a_relative_task_file_are_found_by_workers(here, name):
    row = {"prompt": "<image>", "image": "a.png"}
    (here / name).write_text(json.dumps([row] if name.endswith(".json") else row))
    (found,) = data_files(here.relative_to(here) / name, None)
    (medium,) = shown_by(found.source[0])
    assert os.path.isabs(medium.source) and medium.source == str(here / "a.png")
