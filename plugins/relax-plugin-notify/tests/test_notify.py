# SPDX-License-Identifier: Apache-2.0
"""People are told what a run needs them for, seldom enough, and an address that does not answer holds nobody."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest
from hypothesis import given, strategies as st
from relax_plugin_notify import plugin
from relax_plugin_notify.notifications import NoticeLimiter, Notifier, _target, addresses
from relax_plugin_notify.table import NotifyTable

from relax_core.api.checks import PreflightFacts
from relax_core.api.errors import ConfigError
from relax_core.api.events import (
    GuardFired,
    RoleFailed,
    RoleRecovered,
    RolledBack,
    RunFinished,
    RunOpened,
    RunRestarted,
    RunStarted,
    SamplesScored,
)
from relax_core.api.plan import Plan
from relax_core.api.role import Heartbeat, Wait
from relax_core.api.weights import Version
from relax_core.observe.recorder import Recorder
from relax_core.observe.redaction import Redactor
from relax_core.observe.run_directory import RunDirectory
from relax_core.testing.check import CheckSuite
from relax_core.testing.table import TableSuite

STARTED = RunStarted("r", "/runs/maths", {"steps": 30})


class TestTable(TableSuite):
    component = NotifyTable
    options = {"urls": ["env:INBOX"], "events": ["end"]}


class TestAddresses(CheckSuite):
    component = addresses
    facts = PreflightFacts({"steps": 2}, Plan("colocate", (), (), {}, ()), 1 << 30)


class Clock:
    at = 100.0

    def __call__(self):
        return self.at


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def warnings(caplog):
    """Return the warnings that were logged."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@contextmanager
def receiver(answer=lambda: 200):
    """A real HTTP server of this machine, which gives each request the status that `answer` returns."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = answer()
            if status == 200:
                received.append((message["title"], message["message"]))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"json://:hunter2-token@127.0.0.1:{server.server_port}/", received
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class Notified:
    """A notifier whose messages are awaited."""

    def __init__(self, *urls, clock=time.monotonic, **table):
        for url in urls:  # a run also checks its addresses first: else the import of Apprise takes of a message's time
            _target(url)
        redact = Redactor(["hunter2-token", "hunter2"]).text
        self.notifier = Notifier(urls, "maths", NotifyTable(**table), redact, clock)

    def tell(self, *told):
        for event in told:
            self.notifier.event(event)
        self.notifier.close()


def test_each_kind_of_event_is_sent_with_its_reason():
    evidence = {"groups": (1,)}
    with receiver() as (url, received):
        Notified(url, burst=9).tell(
            STARTED,
            GuardFired(7, "reward", "pause", "reward/mean was 0.1", evidence),
            RoleFailed("engine", "engine-0 was quarantined: it lied", 4, fatal=False),
            RoleRecovered("engine", 2.5, "engine-0"),
            RolledBack(4, Version("actor", 1, 4), "a rank died"),
            RunRestarted(4, "the machine is gone", 2, 3),
            RoleFailed("actor", "out of memory", 4, fatal=True),
            RunFinished("failed", {"steps": 9, "wall_seconds": 61.2, "error": "out of memory", "exit_code": 4}),
        )
    assert received == [
        ("maths: started", "30 steps, in /runs/maths"),
        ("maths: guard reward fired at step 7 (pause)",
         "reward/mean was 0.1; the run is paused until `relax continue`, and `relax why` says more"),
        ("maths: engine failed", "engine-0 was quarantined: it lied"),
        ("maths: engine works again", "after 2.5 s: engine-0"),
        ("maths: rolled back to step 4", "a rank died"),
        ("maths: the run restarted after step 4", "restart 2 of 3 in a row, after: the machine is gone"),
        ("maths: failed", "9 steps, 61 s, out of memory"),
    ]  # fmt: skip


def test_only_configured_kinds_of_events_are_sent():
    with receiver() as (url, received):
        Notified(url, events=["end"]).tell(STARTED, RoleRecovered("actor", 1.0), RunFinished("finished", {"steps": 3}))
    assert received == [("maths: finished", "3 steps, 0 s")]


def test_messages_hold_no_secret_no_control_character_and_no_sample():
    failed = RoleFailed("rewards", "judge: ValueError: the answer is 42\x1b[2J with hunter2", 3, fatal=False)
    infrastructure = RoleFailed("engine", "\x1b[2J no route with hunter2 " + "x" * 9000, 4, fatal=False)
    end = RunFinished("failed", {"error": "judge: ValueError: the answer is 42", "exit_code": 3})
    with receiver() as (url, received):
        Notified(url, burst=9).tell(failed, infrastructure, end)
        Notified(url, burst=9, samples=True).tell(failed)
    texts = [text for _, text in received]
    assert texts[0] == "an error of judge; its text is in the run's events.jsonl" and "judge" in texts[2]
    assert "42" in texts[3] and not any("42" in text for text in texts[:3])
    assert all("hunter2" not in text and "\x1b" not in text and len(text) <= 1500 for text in texts)


def test_suppressed_messages_are_counted_in_the_next_message(clock):
    with receiver() as (url, received):
        told = Notified(url, clock=clock, burst=2, every_s=60.0)
        for _ in range(5):
            told.notifier.event(RoleRecovered("engine", 1.0))
        told.notifier.heartbeats([beat("rollout", since=0.0, deadline=50.0)], now=81.0)
        clock.at += 61.0
        told.notifier.event(RoleRecovered("engine", 2.0))
        told.notifier.event(RoleRecovered("engine", 3.0))
        told.tell(RunFinished("finished", {}))
    assert [text for _, text in received][2:] == [
        "after 2.0 s\nLeft out since the last message: 3 of recovery, 1 of stall.",
        "0 steps, 0 s\nLeft out since the last message: 1 of recovery.",
    ]
    assert told.notifier.counts == {"sent": 4, "unsent": 0, "suppressed": 5}


KINDS = ("start", "stall", "divergence", "recovery", "end")


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.0, 40.0), st.booleans()), max_size=60),
    st.integers(1, 4), st.floats(1.0, 50.0),
)  # fmt: skip
def test_the_limiter_admits_its_rate_and_counts_suppressed_messages_once(offers, burst, every_s):
    limiter, now, ordinary, counted = NoticeLimiter(burst, every_s), 0.0, [], Counter()
    for kind, later_s, urgent in offers:
        now += later_s
        left_out = limiter.admit(kind, now, urgent)
        assert left_out is not None or not urgent
        if left_out is None:
            counted[kind] += 1
            continue
        assert left_out == counted
        counted = Counter()
        if not urgent:
            ordinary.append(now)
    for at, since in enumerate(ordinary):
        for until in range(at, len(ordinary)):
            assert until - at + 1 <= burst + (ordinary[until] - since) / every_s + 1e-6
    assert limiter.suppressed == counted


def beat(role, since, deadline, polls=False, blocked_by="actor", state="waiting"):
    return Heartbeat(role, state, waits=(Wait(role, "a grant", blocked_by, since, deadline, polls),))


def test_a_long_wait_is_sent_once_and_a_pause_is_not_a_stall(clock):
    with receiver() as (url, received):
        told = Notified(url, clock=clock, burst=9, stall_s=600.0)
        late, fresh = beat("critic", 10.0, 50.0), beat("actor", 100.0, 900.0)
        polls, paused = (
            beat("rollout", 10.0, 50.0, polls=True),
            beat("actor", 0.0, 9.0, blocked_by="a person", state="paused"),
        )
        for now in (49.0, 79.0, 81.0, 82.0, 611.0, 612.0):
            told.notifier.heartbeats([late, fresh, polls], now)
        told.notifier.heartbeats([late, polls, paused], 613.0)
        told.notifier.heartbeats([late], 614.0)
        told.tell()
    assert [title for title, _ in received] == [
        "maths: critic waits too long", "maths: rollout waits too long", "maths: critic waits too long",
    ]  # fmt: skip
    assert received[0][1] == "critic has waited 71 s for a grant, blocked by actor; see `relax why`"


def test_an_address_that_hangs_holds_neither_the_run_nor_the_others(warnings, clock):
    started, release = threading.Event(), threading.Event()

    def hang():
        started.set()
        release.wait(120)
        return 200

    with receiver(hang) as (hanging, _), receiver() as (url, received):
        told = Notified(hanging, url, clock=clock, burst=99, timeout_s=2.0)
        told.notifier.event(STARTED)
        assert started.wait(120)
        while told.notifier.counts["sent"] < 1:
            time.sleep(0.01)
        told.notifier.heartbeats((), 0.0)
        assert warnings() == [], "an address is given up only at its deadline"
        clock.at += 3
        told.notifier.heartbeats((), 0.0)
        assert warnings() == ["notify.urls[0] is off: one message took longer than 2 s"]
        told.tell(RunFinished("finished", {}))
        assert told.notifier.counts == {"sent": 2, "unsent": 2, "suppressed": 0}
        release.set()
    assert [title for title, _ in received] == ["maths: started", "maths: finished"]


def test_an_address_that_fails_is_logged_once_counted_and_tried_again(warnings):
    answers = iter([500, 500, 200])
    with receiver(lambda: next(answers)) as (url, received):
        told = Notified(url)
        told.tell(STARTED, RoleRecovered("engine", 1.0), RunFinished("finished", {}))
    assert [title for title, _ in received] == ["maths: finished"] and told.notifier.counts["unsent"] == 2
    assert warnings() == ["notify.urls[0] did not take a message; further failures are only counted"]


def test_a_url_that_is_not_understood_is_reported_without_the_url(caplog, warnings):
    told = Notified("nosuchservice://secret-token")
    told.tell(STARTED, RunFinished("finished", {}))
    assert "is not understood" in warnings()[0] and "secret-token" not in caplog.text


def test_a_recorded_run_reports_how_it_ended_also_where_it_breaks_off(tmp_path, monkeypatch, caplog):
    """With samples asked for, a divergence quotes one of the step's; the log counts messages."""
    caplog.set_level("INFO")
    run_dir = RunDirectory.create(tmp_path / "run", "run", datetime(2026, 1, 1), Random(0))
    run_dir.write_config("steps = 30\n")
    with receiver() as (url, received), pytest.raises(ValueError):
        monkeypatch.setenv("INBOX", url)
        config = {"notify": {"urls": ["env:INBOX"], "samples": True}}
        with Recorder(run_dir, observers={"notify": plugin}) as recorder:
            recorder.tell_observers(RunOpened("maths", str(run_dir.path), config, run_dir.redactor.text))
            recorder.write(STARTED)
            recorder.write(SamplesScored(3, ({"group_id": 5, "response": "my answer"},)))
            recorder.write(GuardFired(3, "reward", "warn", "it fell", {"groups": (5,)}))
            recorder.heartbeats([beat("rollout", since=0.0, deadline=1.0)])
            raise ValueError("boom")
    assert [title for title, _ in received] == [
        "maths: started", "maths: guard reward fired at step 3", "maths: rollout waits too long", "maths: failed",
    ]  # fmt: skip
    assert received[1][1] == "it fell; the run continues\nA sample: my answer" and "boom" in received[3][1]
    assert "notifications: 4 sent, 0 unsent, 0 suppressed" in caplog.messages


def test_a_run_without_addresses_sends_nothing():
    plugin.relax_run_opened(RunOpened("maths", "", {"notify": {"urls": []}}, str))
    plugin.relax_run_started(STARTED)
    plugin.relax_run_closed()


def test_an_invalid_address_is_refused_before_the_run_and_not_quoted(monkeypatch):
    facts = PreflightFacts({"notify": {"urls": ["env:INBOX"]}}, TestAddresses.facts.plan, 1 << 30)
    monkeypatch.setenv("INBOX", "no-such-service-hunter2:/there")
    (refused,) = addresses(facts)
    assert (refused.state, refused.field) == ("failed", "notify.urls.0") and "hunter2" not in str(refused)
    monkeypatch.setenv("INBOX", "json://localhost/there")
    assert [finding.state for finding in addresses(facts)] == ["ok"]
    monkeypatch.delenv("INBOX")
    with pytest.raises(ConfigError, match="env:INBOX: got an environment variable that is not set"):
        list(addresses(facts))
