# SPDX-License-Identifier: Apache-2.0
"""relax logs: the files of all processes as one log, of runs that are live, ended, damaged or old."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relax_core.api.errors import ConfigError
from relax_core.cli.main import app
from relax_core.observe.event_log import EventLog, brief
from relax_core.observe.process_log import ProcessLog, timestamp
from relax_core.observe.redaction import Redactor
from relax_core.observe.run_directory import RunDirectory
from relax_core.observe.status import status_document
from relax_core.views import logs as views_logs
from relax_core.views.logs import LogFilter, RunLogs, follow, parsed_since
from relax_core.views.run import RunView

BEGIN = 1_764_240_000.0
"""2025-11-27T10:40:00 UTC."""


class Run:
    """A run whose processes write at chosen seconds after BEGIN."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0.0
        path.mkdir()
        (path / "config.toml").write_text("steps = 3\n")
        self.end("running")

    def event(self, at: float, message: str, level: str = "info", **facts: Any) -> None:
        log = EventLog(self.path, Redactor(), wall=lambda: BEGIN + at, stderr=False)
        log.note(level, message, **facts)
        log.close()

    def record(
        self, at: float, process: str, message: str, level: str = "info", role: str = "rollout", **more: Any
    ) -> None:
        folder = self.path / more.pop("folder", "logs")
        log = ProcessLog(folder / f"{process}.jsonl", Redactor(), {"run": "r", "role": role, "process": process})
        log.append({"time": timestamp(BEGIN + at), "level": level, "message": message, **more})
        log.close()

    def end(self, state: str = "finished") -> None:
        status = status_document((), 0.0, BEGIN, {"state": state, "run_id": "r"})
        RunDirectory.open(self.path).write("status", {**status, "pid": os.getpid() if state == "running" else 1 << 22})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "r")
    made.event(0, "begins")
    made.record(3, "engine-0", "slow\nvery slow", "warning", logger="vllm.core")
    made.record(1, "engine-0", "loading")
    made.record(2, "actor-0", "compiles", role="actor", step=1, fields={"chunks": 2, "share": 0.123456789})
    made.record(4, "actor-0", "lost", "error", role="actor", step=2, error="Traceback\n  File 'x'\nValueError: no\n")
    made.record(2.5, "rollout", "in a stage", folder="stages/one/logs")
    return made


@pytest.fixture
def relax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("RELAX_RUNS", str(tmp_path))
    monkeypatch.setattr("relax_core.cli.logs.time.time", lambda: BEGIN + 600)

    def call(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ("logs", *arguments))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return call


def test_records_of_all_processes_are_printed_in_order_of_time(run: Run, relax: Callable[..., Any]) -> None:
    """Within the file of a process the order of writing stays."""
    run.end()
    result = relax()
    assert result.stdout.splitlines() == [
        "10:40:00 info    controller: begins",
        "10:40:02 info    actor/actor-0: compiles  step=1  chunks=2  share=0.1235",
        "10:40:02 info    rollout: in a stage",
        "10:40:03 warning rollout/engine-0: slow",
        "very slow",
        "10:40:01 info    rollout/engine-0: loading",
        "10:40:04 error   actor/actor-0: lost  step=2",
        "Traceback",
        "  File 'x'",
        "ValueError: no",
    ]
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--role", "rollout"), ["in a stage", "slow\nvery slow", "loading"]),
        (("--role", "engine-0", "--level", "warning"), ["slow\nvery slow"]),
        (("--role", "actor", "--role", "controller"), ["begins", "compiles", "lost"]),
        (("--level", "error"), ["lost"]),
        (("--step", "1"), ["compiles"]),
        (("--since", "2025-11-27T10:40:03"), ["slow\nvery slow", "lost"]),
        (("--since", "2025-11-27T12:40:03+02:00", "--level", "error"), ["lost"]),
        (("--since", "9.95m"), ["slow\nvery slow", "lost"]),
        (("--last", "2"), ["loading", "lost"]),
        (("--last", "0"), []),
    ],
)
def test_records_are_chosen_by_role_process_level_time_step_and_number(
    run: Run, relax: Callable[..., Any], arguments: tuple[str, ...], messages: list[str]
) -> None:
    lines = [json.loads(line) for line in relax("r", "--json", *arguments).stdout.splitlines()]
    assert [line["message"] for line in lines] == messages


def test_lists_and_tables_of_a_record_are_cut_for_people_and_texts_are_not() -> None:
    assert (brief(1.5), brief("x" * 500), brief([1, 2])) == ("1.5", "x" * 500, "[1, 2]")
    assert brief(list(range(500))) == f"{str(list(range(500)))[:120]}..."


def test_unusable_options_name_the_fix(run: Run, relax: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="--level: got loud.*warning"):
        relax("--level", "loud")
    with pytest.raises(ConfigError, match="--since: got yesterday.*10m"):
        relax("--since", "yesterday")
    assert parsed_since("99999d", 0.0) == "1970-01-01T00:00:00.000+00:00"


def test_a_role_without_records_and_a_live_run_are_named(run: Run, relax: Callable[..., Any]) -> None:
    said = relax("--role", "critic").stderr
    assert "no record of critic; there are records of actor, actor-0, controller, engine-0, rollout" in said
    assert "r is silent; --follow shows further records" in said


def test_damaged_lines_are_counted_and_a_cut_line_is_no_fault_of_a_live_run(
    run: Run, relax: Callable[..., Any]
) -> None:
    path = run.path / "logs" / "engine-0.jsonl"
    with path.open("ab") as file:
        file.write(b'no json\n[1]\n{"time": "2025-11-27T10:40:09+00:00", "level": "info", "event": "logged"}\n\xff\n')
        file.write(b'{"time": "2025-11-27T10:40:09.000+00:00", "level": "loud", "message": "x"}\n{"time": "2025')
    assert "logs/engine-0.jsonl: 5 of its lines are not records" in relax().stderr and "cut off" not in relax().stderr
    run.end()
    assert "logs/engine-0.jsonl: its last line is cut off" in relax().stderr
    assert len(relax("--json").stdout.splitlines()) == 6


def test_a_run_of_an_earlier_version_shows_its_events_and_names_its_output(
    tmp_path: Path, relax: Callable[..., Any]
) -> None:
    run = Run(tmp_path / "r")
    assert "has logged nothing yet" in relax().stderr
    run.event(0, "begins")
    run.end()
    (run.path / "logs").mkdir()
    (run.path / "logs" / "engine-0.log").write_text("loading\n")
    result = relax()
    assert result.stdout == "10:40:00 info    controller: begins\n"
    assert "no records of its processes, as runs of earlier versions" in result.stderr
    assert "logs/engine-0.log" in result.stderr


def test_text_of_records_can_t_control_the_terminal(run: Run, relax: Callable[..., Any]) -> None:
    run.record(9, "engine-0", "a \x1b[2J b \ud800")
    assert "a \\u001b[2J b" in relax("--role", "engine-0").stdout


def test_following_yields_each_record_once_until_the_run_has_ended(run: Run) -> None:
    view = RunView(run.path)
    found = RunLogs(run.path)
    assert len(list(found.added())) == 6 and list(found.added()) == []
    path = run.path / "logs" / "engine-0.jsonl"
    record = {"schema": "relax.log/1", "time": timestamp(BEGIN + 20), "level": "info", "process": "engine-0"}
    half = json.dumps({**record, "message": "half"})

    def steps() -> Iterator[None]:
        run.record(10, "reward-0", "of a new process")
        run.record(9, "engine-0", "earlier")
        yield
        path.write_bytes(path.read_bytes() + half[:30].encode())
        yield
        path.write_bytes(path.read_bytes() + f"{half[30:]}\n".encode())
        run.end()
        yield
        raise AssertionError("the run has ended")

    script = steps()
    got = [record["message"] for record in follow(view, found, lambda _: next(script), lambda: BEGIN)]
    assert got == ["earlier", "of a new process", "half"]


def test_following_waits_for_the_last_records_of_the_process_of_an_ended_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, now = [7, 7, 0], [BEGIN]
    run.end()
    monkeypatch.setattr(views_logs, "process_of", lambda _: alive.pop(0))

    def sleep(seconds: float) -> None:
        run.record(now[0] - BEGIN, "driver", "last words")
        now[0] += seconds

    records = list(follow(RunView(run.path), RunLogs(run.path), sleep, lambda: now[0]))
    assert [record["message"] for record in records].count("last words") == 2 and not alive
    monkeypatch.setattr(views_logs, "process_of", lambda _: 7)
    list(follow(RunView(run.path), RunLogs(run.path), lambda _: now.append(now.pop() + 61), lambda: now[0]))


def test_long_files_are_read_in_blocks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        run.record(20 + number, "engine-1", "x" * number)
    monkeypatch.setattr(views_logs, "BLOCK_BYTES", 100)
    found = [record for record in RunLogs(run.path).added() if record in LogFilter(("engine-1",))]
    assert [len(record["message"]) for record in found] == list(range(20))
