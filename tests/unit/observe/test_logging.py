# SPDX-License-Identifier: Apache-2.0
"""The log in its file and on stderr, without secrets."""

import json
import threading
from datetime import UTC, datetime

from relax_core.api.errors import printable
from relax_core.observe.logging import Redactor, RoleLog

SECRET = "s3cr3t-value"


def now():
    return datetime(2026, 11, 20, 12, 30, tzinfo=UTC)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_has_every_line_and_stderr_those_of_the_level(tmp_path, capsys):
    log = RoleLog(tmp_path, "actor", level="warning", now=now)
    log.logger.info("step done", step=3)
    log.logger.warning("slow", seconds=2.5)
    log.close()
    assert [(line["level"], line["event"], line["role"]) for line in records(tmp_path / "actor.jsonl")] == [
        ("info", "step done", "actor"),
        ("warning", "slow", "actor"),
    ]
    assert records(tmp_path / "actor.jsonl")[0]["step"] == 3
    captured = capsys.readouterr()
    assert captured.err == "12:30:00 warning actor: slow  seconds=2.5\n" and captured.out == ""


def test_an_exception_brings_its_frames(tmp_path):
    log = RoleLog(tmp_path, "actor", level="critical")
    try:
        raise ValueError("odd")
    except ValueError:
        log.logger.exception("failed")
    (record,) = records(tmp_path / "actor.jsonl")
    assert record["level"] == "error" and "ValueError: odd" in record["exception"]


def test_secrets_reach_neither_file_nor_stderr(tmp_path, capsys):
    log = RoleLog(tmp_path, "actor", level="debug", redactor=Redactor([SECRET]))
    log.logger.bind(url=f"https://user:{SECRET}@host/x").warning(
        f"login with {SECRET}", headers={"Authorization": "abc"}
    )
    log.logger.info("push", url="https://me:hunter2hunter2@host/x", note="Bearer abcdef123456", key="hf_" + "a" * 30)
    log.logger.info("numbers stay", tokens=512, token="t0p", max_tokens=3)
    log.close()
    written = (tmp_path / "actor.jsonl").read_text() + capsys.readouterr().err
    for secret in (SECRET, "hunter2hunter2", "abcdef123456", "hf_aaa", "t0p", '"abc"'):
        assert secret not in written
    assert '"tokens":512' in written and '"max_tokens":3' in written


def test_threads_do_not_tear_each_others_lines(tmp_path):
    log = RoleLog(tmp_path, "actor", level="critical")
    threads = [threading.Thread(target=lambda: [log.write("info", "x" * 500) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(records(tmp_path / "actor.jsonl")) == 200


def test_a_log_that_cannot_be_written_is_said_once(tmp_path, capsys):
    log = RoleLog(tmp_path / "missing", "actor", level="critical")
    for _ in range(3):
        log.write("info", "hello")
    assert capsys.readouterr().err.count("the log is not written") == 1


def test_a_role_name_is_a_file_name(tmp_path):
    log = RoleLog(tmp_path, "rollout/engine 0", level="critical")
    log.write("info", "hello")
    assert (tmp_path / "rollout-engine-0.jsonl").exists()


def test_control_characters_reach_no_terminal(tmp_path, capsys):
    RoleLog(tmp_path, "actor").write("error", "said \x1b[31mred\x1b]8;;http://x\x07", by="\x9b2J\u202e\r")
    shown = capsys.readouterr().err
    assert r"\u001b[31mred\u001b]8;;http://x\u0007" in shown and r"\u009b2J\u202e\u000d" in shown
    assert all(character == "\n" or character.isprintable() for character in shown)


def test_what_is_printable_stays_and_a_json_document_means_the_same():
    text = "tab\tline\nein schönes 日本語 🙂 שלום"
    assert printable(text) == text
    document = {"a": "\x1b[0m\x7f\x9b\u2028"}
    assert json.loads(printable(json.dumps(document, ensure_ascii=False))) == document
