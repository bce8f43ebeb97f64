# SPDX-License-Identifier: Apache-2.0
"""The events of a run in their file and on stderr, without secrets."""

import json
import threading

from relax_core.api.errors import printable
from relax_core.api.events import (
    CheckpointSaved,
    GuardFired,
    Logged,
    RoleFailed,
    RoleRecovered,
    RolledBack,
    RunRestarted,
    SamplesScored,
    StepFinished,
    WeightsPublished,
    WorkRetried,
    describe,
)
from relax_core.api.weights import Version
from relax_core.observe.event_log import EventLog, recorded_event
from relax_core.observe.redaction import Redactor

SECRET = "s3cr3t-value"
NOON = 1_795_262_400.0


def records(path):
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def test_the_file_has_every_event_and_stderr_the_warnings(tmp_path, capsys):
    log = EventLog(tmp_path, Redactor(), wall=lambda: NOON)
    log.write(StepFinished(3, {"reward/mean": 0.5}))
    log.write(SamplesScored(3, ({"response": "x"},)))
    log.write(WeightsPublished(Version("actor", 0, 3), 0.1, 10))
    log.write(RolledBack(2, Version("actor", 1, 2), "a rank died"))
    log.write(Logged("warning", "actor", "slow disk", {"seconds": 2.5}))
    log.write(RoleFailed("actor", "out of memory", 4, fatal=True))
    log.close()
    first, published, back, slow, last = records(tmp_path)
    assert first == {
        "schema": "relax.event/1", "time": "2026-11-21T12:00:00.000+00:00", "level": "info", "event": "step finished",
        "step": 3, "at": 0.0,
    }  # fmt: skip
    assert published["version"] == "actor@0.3" and back["event"] == "rolled back"
    assert (slow["event"], slow["level"], slow["fields"]) == ("logged", "warning", {"seconds": 2.5})
    assert (last["event"], last["level"]) == ("role failed", "error"), "the command prints this error"
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines() == [
        "12:00:00 warning controller: rolled back  step=2 version=actor@1.2 reason=a rank died",
        "12:00:00 warning actor: slow disk  seconds=2.5",
    ]


def test_a_record_is_read_as_its_event_and_described_for_people(tmp_path):
    log = EventLog(tmp_path, Redactor(), stderr=False)
    evidence = {"metric": "reward/mean", "value": 0.1}
    described = {
        RoleFailed("rollout", "it died", 4, fatal=False): ("rollout failed", "it died"),
        RoleRecovered("engine", 2.5, "engine-0"): ("engine works again", "after 2.5 s: engine-0"),
        RolledBack(2, Version("actor", 1, 2), "a rank died"): ("rolled back to step 2", "a rank died"),
        RunRestarted(0, "the hub died", 1, 3): (
            "the run restarted from its beginning", "restart 1 of 3 in a row, after: the hub died",
        ),
        WorkRetried("rollout", "samples", 3, "engine-0 died"): ("rollout: 3 samples retried", "engine-0 died"),
        CheckpointSaved(2, "checkpoints/step-000002"): None,
    }  # fmt: skip
    for event in (*described, GuardFired(3, "reward", "warn", "it fell", evidence)):
        log.write(event)
    *read, guard = map(recorded_event, records(tmp_path))
    assert read == list(described) and [describe(event) for event in read] == list(described.values())
    assert guard == GuardFired(3, "reward", "warn", "it fell")
    assert describe(guard) == ("guard reward fired at step 3", "it fell; the run continues")


def test_secrets_reach_neither_file_nor_stderr(tmp_path, capsys):
    log = EventLog(tmp_path, Redactor([SECRET]))
    log.note(
        "warning", f"login with {SECRET}", url=f"https://user:{SECRET}@host/x", headers={"Authorization": "abc"},
        push="https://me:hunter2hunter2@host/x", note="Bearer abcdef123456", key="hf_" + "a" * 30,
    )  # fmt: skip
    log.note("warning", "numbers stay", tokens=512, token="t0p", max_tokens=3)
    log.close()
    written = (tmp_path / "events.jsonl").read_text() + capsys.readouterr().err
    for secret in (SECRET, "hunter2hunter2", "abcdef123456", "hf_aaa", "t0p", '"abc"'):
        assert secret not in written
    assert '"tokens":512' in written and '"max_tokens":3' in written


def test_threads_do_not_tear_each_others_lines(tmp_path):
    log = EventLog(tmp_path, Redactor())
    threads = [threading.Thread(target=lambda: [log.note("info", "x" * 500) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(records(tmp_path)) == 200


def test_an_unwritable_log_is_reported_once(tmp_path, capsys):
    log = EventLog(tmp_path / "missing", Redactor())
    for _ in range(3):
        log.note("info", "hello")
    assert capsys.readouterr().err.count("events.jsonl is not written") == 1


def test_control_characters_reach_no_terminal(tmp_path, capsys):
    EventLog(tmp_path, Redactor()).note("error", "said \x1b[31mred\x1b]8;;http://x\x07", by="\x9b2J\u202e\r")
    shown = capsys.readouterr().err
    assert r"\u001b[31mred\u001b]8;;http://x\u0007" in shown and r"\u009b2J\u202e\u000d" in shown
    assert all(character == "\n" or character.isprintable() for character in shown)


def test_printable_text_stays_and_a_json_document_keeps_its_meaning():
    text = "tab\tline\nein schönes 日本語 🙂 שלום"
    assert printable(text) == text
    document = {"a": "\x1b[0m\x7f\x9b\u2028"}
    assert json.loads(printable(json.dumps(document, ensure_ascii=False))) == document
