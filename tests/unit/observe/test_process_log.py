# SPDX-License-Identifier: Apache-2.0
"""The records of a process: what logging and plain output become, with the fields of the work, without secrets."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from relax_core.api.plan import Plan
from relax_core.observe import process_log
from relax_core.observe.process_log import (
    LONGEST_TEXT,
    MARK,
    ProcessLog,
    bound,
    bound_fields,
    captured,
    record_process,
)
from relax_core.observe.redaction import HIDDEN, Redactor
from relax_core.runners.launch import Launch

ABOUT = {"run": "maths", "role": "rollout", "process": "engine-0"}


@pytest.fixture
def log(tmp_path: Path) -> ProcessLog:
    return ProcessLog(tmp_path / "logs" / "engine-0.jsonl", Redactor(["hush-hush"]), ABOUT, wall=lambda: 0.0)


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("a.library")


def written(log: ProcessLog) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log._path.read_text().splitlines()]


def marked(**fields: Any) -> str:
    record = {"time": "2026-11-27T10:00:00.000+00:00", "level": "info", "message": "hello", **fields}
    return f"{MARK}{json.dumps(record)}\n"


def test_a_library_s_record_has_its_logger_its_traceback_and_the_fields_of_the_work(
    log: ProcessLog, logger: logging.Logger
) -> None:
    with captured(log, log.processors), bound(step=3), bound(group=7, step=4):
        try:
            raise ValueError("too long")
        except ValueError:
            logger.exception("sample %d failed with hush-hush", 2, extra={"tokens": 12, "api_key": "abc"})
    logger.warning("after the end")
    (record,) = written(log)
    assert record.items() >= {**ABOUT, "schema": "relax.log/1", "level": "error", "logger": "a.library"}.items()
    assert record["message"] == "sample 2 failed with [redacted]" and record["fields"] == {
        "tokens": 12,
        "api_key": "[redacted]",
    }
    assert (record["step"], record["group"]) == (4, 7)
    assert record["error"].splitlines()[-1] == "ValueError: too long"


def test_a_record_has_these_bytes(log: ProcessLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 12)
    monkeypatch.setattr(time, "time", lambda: 1.5)
    monkeypatch.setattr(time, "time_ns", lambda: 1_500_000_000)
    with captured(log, log.processors), bound(sample=1, task="t"), bound(group=7):
        logging.getLogger("a").warning("%s", "é", extra={"shape": (1, 2), "share": 0.5, "none": None})
    assert log._path.read_text() == (
        '{"schema":"relax.log/1","time":"1970-01-01T00:00:01.500+00:00","level":"warning","pid":12,"group":7,"task":"t",'
        '"sample":1,"logger":"a","message":"é","fields":{"shape":"(1, 2)","share":0.5,"none":"None"},"run":"maths",'
        '"role":"rollout","process":"engine-0"}\n'
    )


def test_both_loggers_make_the_same_record(log: ProcessLog, logger: logging.Logger) -> None:
    with captured(log, log.processors), bound(step=3), structlog.contextvars.bound_contextvars(trial="a"):
        try:
            raise ValueError("too long")
        except ValueError:
            logger.exception("sample %d failed", 2, extra={"tokens": 12})
            structlog.get_logger("a.library").exception("sample %d failed", 2, tokens=12)
        logger.warning("done", extra={"event": 1, "exception": 2, "step": 4})
        structlog.get_logger("a.library").warning("done", exception=2, step=4)
    first, second, third, fourth = written(log)
    assert first | {"time": ""} == second | {"time": ""}
    assert first["fields"] == {"trial": "a", "tokens": 12} and first["error"].endswith("ValueError: too long\n")
    assert (third["message"], third["step"]) == (fourth["message"], fourth["step"]) == ("done", 3)
    assert third["fields"] == {"trial": "a", "event": 1, "exception": 2, "step": 4}
    assert fourth["fields"] == {"trial": "a", "exception": 2, "step": 4}


def test_any_keyword_of_structlog_is_a_field_and_its_logger_has_the_name_of_the_module(log: ProcessLog) -> None:
    with captured(log, log.processors):
        structlog.get_logger().warning("named", name="n", args=[1], msg="m", _private=True)
        structlog.get_logger().error(count=1)
    named, nameless = written(log)
    assert named["fields"] == {"name": "n", "args": "[1]", "msg": "m", "_private": True}
    assert named["logger"] == __name__ and (nameless["message"], nameless["fields"]) == ("", {"count": 1})


def test_a_program_that_has_configured_structlog_keeps_its_configuration(log: ProcessLog) -> None:
    own = structlog.testing.LogCapture()
    structlog.configure([own])
    try:
        with captured(log, log.processors):
            structlog.get_logger().info("of the program")
        assert structlog.is_configured() and [event["event"] for event in own.entries] == ["of the program"]
    finally:
        structlog.reset_defaults()
    with captured(log, log.processors):
        assert structlog.is_configured()
    assert not structlog.is_configured() and not log._path.exists()


SECRET = "hush-'hush\"\\hush"
PLACES = {
    "message": lambda text: ((text,), {}),
    "argument": lambda text: (("%s", text), {}),
    "field": lambda text: (("x",), {"field": text}),
    "key": lambda text: (("x",), {text: 1}),
    "nested": lambda text: (("x",), {"field": {"deep": [{"deeper": text}, (text,)]}}),
    "object": lambda text: (("x",), {"field": SimpleNamespace(inner=text)}),
    "secret key": lambda text: (("x",), {"field": {"api_key": "unknown-secret"}}),
    "error": lambda text: (("x",), {"exc_info": ValueError(text)}),
}


LENGTHS = (0, 9, LONGEST_TEXT - 9)


@pytest.mark.parametrize("place", PLACES)
def test_no_secret_passes_whatever_the_logger(log: ProcessLog, place: str) -> None:
    log = ProcessLog(log._path, Redactor([SECRET]), ABOUT)
    in_child = log.processors[1:]
    shown = ""
    for before, after, library, child in product(LENGTHS, LENGTHS, (True, False), (True, False)):
        args, fields = PLACES[place]("a" * before + SECRET + "b" * after)
        sent = io.StringIO()
        with captured(sent, in_child, MARK) if child else captured(log, log.processors):
            if library:
                known = {"exc_info": fields.pop("exc_info", None)}
                logging.getLogger("a.library").error(*args, **known, extra=fields)
            else:
                structlog.get_logger().error(*args, **fields)
        shown += log.output(sent.getvalue())
    text = shown + log._path.read_text()
    assert text.count("\n") >= 36 and HIDDEN in text and "hush" not in text and "unknown-secret" not in text


async def test_fields_belong_to_a_task_and_to_the_tasks_that_it_starts() -> None:
    met = asyncio.Barrier(2)

    async def inner() -> dict[str, Any]:
        await met.wait()
        return bound_fields()

    async def sample(number: int) -> dict[str, Any]:
        with bound(sample=number):
            return await asyncio.create_task(inner())

    with bound(group=1):
        found = await asyncio.gather(sample(0), sample(1))
    assert list(found) == [{"group": 1, "sample": 0}, {"group": 1, "sample": 1}] and bound_fields() == {}


def test_a_message_that_does_not_fit_its_arguments_does_not_end_the_program(
    log: ProcessLog, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    root = logging.getLogger()
    others = root.handlers[:]
    for handler in others:
        root.removeHandler(handler)
    try:
        with captured(log, log.processors):
            logger.warning("%d", "three")
            logger.info("the next")
    finally:
        for handler in others:
            root.addHandler(handler)
    assert [record["message"] for record in written(log)] == ["the next"]


def test_a_program_without_handlers_records_from_info_on_and_gets_its_level_back(log: ProcessLog) -> None:
    root, before = logging.getLogger(), logging.getLogger().level
    others = root.handlers[:]
    for handler in others:
        root.removeHandler(handler)
    try:
        with captured(log, log.processors):
            logging.getLogger("a.library").info("loaded")
            logging.getLogger("httpx").info("HTTP Request")
        assert root.handlers == [] and root.level == before
    finally:
        for handler in others:
            root.addHandler(handler)
    assert [record["message"] for record in written(log)] == ["loaded"]


def test_a_logger_that_keeps_its_records_from_the_root_is_recorded_too(log: ProcessLog) -> None:
    apart = logging.getLogger("apart.of.root")
    apart.propagate = False
    try:
        with captured(log, log.processors):
            apart.warning("heard")
        apart.warning("not heard")
    finally:
        apart.propagate = True
    assert [record["message"] for record in written(log)] == ["heard"] and apart.handlers == []


def test_a_process_records_its_start_and_then_its_logging_until_it_ends(
    log: ProcessLog, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as end:
        monkeypatch.setattr(process_log, "_for_ever", end)
        record_process(log)
        record_process(None)
        logger.warning("at work")
    first, second = written(log)
    assert first["message"].startswith(f"process {os.getpid()} starts") and second["message"] == "at work"


def test_the_log_of_a_launch_has_no_secrets_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_RUN", "hush-hush")
    launch = Launch("maths", str(tmp_path), {"notify": {"urls": ["env:OF_THE_RUN"]}}, Plan("hybrid", (), (), {}, ()))
    assert launch.process_log("hub") is None and list(tmp_path.iterdir()) == []
    (tmp_path / "logs").mkdir()
    for role in ("", "rollout"):
        made = launch.process_log("engine-0", role)
        assert made is not None
        made.append({"level": "info", "message": "of hush-hush"})
        made.close()
    lines = (tmp_path / "logs" / "engine-0.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["message"], first["run"], "role" in first, second["role"]) == (
        "of [redacted]",
        "maths",
        False,
        "rollout",
    )


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("a line\nand another\n", ["info"]),
        ("WARNING 11-27 10:00:00 [core.py:12] slow\nINFO 11-27 10:00:01 [core.py:13] fine\n", ["warning", "info"]),
        ("(EngineCore_DP0 pid=12) ERROR 11-27 10:00:00 [core.py:12] lost\n", ["error"]),
        ("2026-11-27 10:00:00,123 WARN worker.py:3 -- low memory\n", ["warning"]),
        ("[rank0]:W1127 10:00:00.000000 12 torch/x.py:1] compiles again\n", ["warning"]),
        ("/a/b.py:12: FutureWarning: old\n  old()\n", ["warning"]),
        ("begins\nTraceback (most recent call last):\n  File 'x'\nValueError: no\n", ["info", "error"]),
        ("INFORMATION\n[[[ (((\n1 2 3\n", ["info"]),
        ("\n\n", []),
    ],
)
def test_plain_output_becomes_records_with_the_levels_of_its_lines(
    log: ProcessLog, text: str, levels: list[str]
) -> None:
    log.append({"level": "debug", "message": "first"})
    assert log.output(text) == text
    _, *records = written(log)
    assert [record["level"] for record in records] == levels
    assert "\n".join(record["message"] for record in records) == text.strip("\n")


def test_a_marked_line_is_a_record_wherever_it_begins(log: ProcessLog) -> None:
    shown = log.output("loading ..." + marked(logger="x", error="Traceback\n", step=2, pid=12) + "done\n")
    output, record, rest = written(log)
    assert (output["message"], rest["message"]) == ("loading ...", "done")
    assert record.items() >= {"time": "2026-11-27T10:00:00.000+00:00", "message": "hello", "step": 2, "pid": 12}.items()
    assert shown == "loading ...info x: hello\nTraceback\ndone\n"


@pytest.mark.parametrize(
    "text",
    [
        f"{MARK}{{}}\n", f"{MARK}[1]\n", f"{MARK}no json\n", MARK + "[" * 100_000 + "\n", marked(level="loud"),
        marked(time="now"), marked(time=3), marked(level=["info"]),
    ],
    ids=range(8),
)  # fmt: skip
def test_a_marked_line_of_another_shape_is_plain_output(log: ProcessLog, text: str) -> None:
    assert log.output(text) == text.replace(MARK, "")
    assert [record["level"] for record in written(log)] == ["info"]


def test_a_hostile_child_can_t_choose_its_name_and_is_kept_short(log: ProcessLog) -> None:
    log.output(
        marked(process="driver", run="x", message="a" * 100_000, schema="y", fields={"deep": [[1]], "a": 1}, group=[1])
    )
    (record,) = written(log)
    assert record.items() >= {**ABOUT, "schema": "relax.log/1", "fields": {"a": 1}}.items() and "group" not in record
    assert len(record["message"]) < LONGEST_TEXT + 100 and record["message"].endswith("(91808 characters left out)")
    log.output(marked(message="\ud800"))
    assert written(log)[1]["message"] == "\ud800"


CHILD = """
import logging, os, sys, warnings
from relax_core.observe.process_log import bound, send_to_parent
assert "rich" not in sys.modules, "its import takes longer than all others of a child"
send_to_parent()
import rich, structlog
with bound(step=3):
    structlog.get_logger("a").info("key %s", os.environ["A_TOKEN"], headers={"password": "hush"})
    logging.getLogger("b").info("read")
    logging.getLogger("httpx").info("HTTP Request")
    warnings.warn("old")
"""


@pytest.mark.process
def test_a_child_sends_the_records_of_both_loggers_and_its_warnings_to_its_parent(log: ProcessLog) -> None:
    environment = {**os.environ, "A_TOKEN": "hush-of-the-child"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, stderr=subprocess.PIPE, text=True, check=True
    )
    log.output(child.stderr)
    assert [(record["level"], record["logger"], record["step"], record["message"]) for record in written(log)] == [
        ("info", "a", 3, "key [redacted]"), ("info", "b", 3, "read"),
        ("warning", "py.warnings", 3, "<string>:11: UserWarning: old\n"),
    ]  # fmt: skip
    assert "hush" not in child.stderr and written(log)[0]["fields"] == {"headers": "{'password': '[redacted]'}"}


def test_a_line_that_a_killed_process_left_unfinished_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.jsonl"
    path.write_text('{"schema": "relax.lo')
    log = ProcessLog(path, Redactor(), ABOUT)
    log.append({"level": "info", "message": "again"})
    log.close()
    torn, line = path.read_text().splitlines()
    assert torn == '{"schema": "relax.lo' and json.loads(line)["message"] == "again"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_can_t_be_written_does_not_stop_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ProcessLog(tmp_path / "file" / "x.jsonl", Redactor(), ABOUT).append({"level": "info", "message": "lost"})
