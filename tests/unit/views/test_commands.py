# SPDX-License-Identifier: Apache-2.0
"""relax runs, status, why, report, through the command line's own parser."""

import ast
import json
from pathlib import Path

import pytest
import relax_plugin_workbench
from typer.testing import CliRunner

from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.events import FirstStepChecked
from relax_core.cli import terminal
from relax_core.cli.main import app
from relax_core.cli.terminal import fail, say
from relax_core.observe.event_log import EventLog
from relax_core.observe.redaction import Redactor


@pytest.fixture
def relax(tmp_path, monkeypatch):
    monkeypatch.setenv("RELAX_RUNS", str(tmp_path))

    def call(*arguments):
        result = CliRunner().invoke(app, arguments)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result

    return call


def test_runs_are_listed_newest_first(relax, tmp_path, write_run):
    write_run(tmp_path, steps=20, name="first")
    path = write_run(tmp_path, steps=3, ending=None, name="second")
    listed = json.loads(relax("runs", "--json").stdout)
    assert listed["schema"] == "relax.runs/1"
    by_name = {run["name"].split("-")[0]: run for run in listed["runs"]}
    assert (by_name["first"]["state"], by_name["first"]["step"], by_name["first"]["steps"]) == ("finished", 20, 120)
    assert by_name["second"]["step"] == 3 and by_name["second"]["reward_last"] == pytest.approx(0.3, abs=0.1)
    table = relax("runs").stdout
    assert path.name in table and "20/120" in table


def test_no_runs_is_not_an_error(relax):
    result = relax("runs")
    assert result.stdout == "" and "no runs under" in result.stderr
    assert json.loads(relax("runs", "--json").stdout)["runs"] == []


def test_status_shows_roles_of_the_latest_run(relax, tmp_path, write_run):
    path = write_run(tmp_path, steps=3, ending=None)
    text = relax("status").stdout
    assert path.name in text and "3/120" in text and "for 8 groups from rollout" in text
    said = json.loads(relax("status", path.name, "--json").stdout)
    assert said["schema"] == "relax.run-status/1" and {role["role"] for role in said["roles"]} == {"actor", "rollout"}


def test_why_names_the_blocker(relax, tmp_path, write_run):
    write_run(tmp_path, steps=3, ending=None)
    assert "actor waits for 8 groups, blocked by rollout" in relax("why").stdout
    assert json.loads(relax("why", "--json").stdout)["waits"][0]["blocked_by"] == "rollout"


def test_status_why_and_report_show_the_checks_of_the_first_step(relax, tmp_path, write_run):
    """Those that were made last, after a rollback."""
    passed = {"name": "rewards differ", "state": "ok", "found": "spread 0.5", "evidence": "", "advice": ""}
    failed = {
        "name": "the ratio is 1",
        "state": "failed",
        "found": "at most 1.4",
        "evidence": "",
        "advice": "look <here>",
    }
    path = write_run(tmp_path, steps=3, ending=None)
    log = EventLog(path, Redactor(), stderr=False)
    assert "step 1:" not in relax("status").stdout + relax("why").stdout
    log.write(FirstStepChecked(1, (failed,)))
    log.write(FirstStepChecked(1, (passed, {**passed, "state": "not applicable"})))
    assert "step 1: all 1 checks passed" in relax("status").stdout and "step 1:" not in relax("why").stdout
    log.write(FirstStepChecked(1, (passed, failed)))
    log.close()
    line = "step 1: check failed: the ratio is 1: at most 1.4; look <here>"
    assert line in relax("status").stdout.splitlines() and line in relax("why").stdout.splitlines()
    assert json.loads(relax("status", "--json").stdout)["first_steps"] == {"1": [passed, failed]}
    assert json.loads(relax("why", "--json").stdout)["first_step"] == [line]
    relax("report", str(path))
    page = (path / "report.html").read_text()
    assert "the ratio is 1: at most 1.4; look &lt;here&gt;" in page
    assert "<td>rewards differ</td><td>ok</td><td>spread 0.5</td>" in page


def test_report_prints_only_the_pages_path_and_a_finished_run_names_only_an_existing_page(relax, tmp_path, write_run):
    path = write_run(tmp_path, steps=3)
    again = ("train", "quickstart", "--run-dir", str(path), "--resume")
    assert relax(*again).stdout == f"model:  {path / 'export'}\n"
    page = f"{path / 'report.html'}\n"
    assert relax("report", str(path)).stdout == page
    assert relax(*again).stdout == f"report: {page}model:  {path / 'export'}\n"


def test_a_transcript_and_an_error_cannot_steer_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("RELAX_TRACEBACK", "1")
    say("task \x9b2J  reward 1\n  response: \x1b]0;mine\x07\x1b[8mhidden")
    fail(PluginError("reward mine", "got \x1b[2J", "frame \x1b[1A"))
    out, err = capsys.readouterr()
    assert r"\u001b]0;mine\u0007\u001b[8mhidden" in out and "\x9b" not in out and "\x1b" not in out + err
    assert r"frame \u001b[1A" in err and r"got \u001b[2J" in err


def test_the_traceback_of_a_plugin_is_printed_only_on_request(capsys, monkeypatch):
    monkeypatch.delenv("RELAX_TRACEBACK", raising=False)
    assert fail(PluginError("reward mine", "KeyError: 'x' (mine.py:3)", "frame in mine.py")) == 3
    hint = "relax: RELAX_TRACEBACK=1 shows the traceback"
    assert capsys.readouterr().err == f"{hint}\nrelax: reward mine: KeyError: 'x' (mine.py:3)\n"


def test_every_verb_prints_through_one_function():
    """`say` makes control characters visible; a print beside it would let them through."""
    for source in (
        *Path(terminal.__file__).parent.glob("*.py"),
        *Path(relax_plugin_workbench.__path__[0]).glob("*.py"),
    ):
        calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
        names = [ast.unparse(node.func) for node in calls]
        assert "print" not in names and names.count("typer.echo") == (source.name == "terminal.py"), source.name


@pytest.mark.parametrize("verb", ["status", "why", "report"])
def test_a_missing_run_is_a_usage_error(relax, verb):
    with pytest.raises(ConfigError, match="run: got nosuch; name a run directory") as caught:
        relax(verb, "nosuch")
    assert caught.value.exit_code == 2


def test_a_stop_of_a_run_that_ended_without_room_for_its_summary_says_how_it_ended(relax, tmp_path, write_run):
    path = write_run(tmp_path, steps=3, ending="stopped")
    (path / "summary.json").unlink()
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "host": "elsewhere"}))
    assert "stopped before its first checkpoint; start the run again" in relax("stop", path.name).stdout
