# SPDX-License-Identifier: Apache-2.0
"""Events become files, sinks, observers and a summary; nothing that is told can break the run."""

import json
import math
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from relax_core.api.errors import RelaxError
from relax_core.api.events import (
    UNDONE,
    CheckpointSaved,
    EvalFinished,
    EventsDropped,
    GuardFired,
    Logged,
    RoleFailed,
    RoleRecovered,
    RolledBack,
    RolloutMeasured,
    RunClosed,
    RunFinished,
    RunOpened,
    RunRestarted,
    RunStarted,
    SamplesScored,
    Sink,
    Span,
    StepFinished,
    TimeSpent,
    WeightsPublished,
    WorkAtEnd,
)
from relax_core.api.role import Heartbeat, Wait
from relax_core.api.weights import Version
from relax_core.observe.files import read_document
from relax_core.observe.recorder import Recorder
from relax_core.observe.records import read_frames
from relax_core.observe.redaction import Redactor
from relax_core.observe.run_directory import RunDirectory

BALANCE = {
    "samples/issued": 40.0, "samples/trained": 30.0, "samples/in_flight": 8.0, "samples/dropped": 2.0,
    "samples/dropped/stale": 2.0,
}  # fmt: skip
SUMMARY_FIELDS = {
    "status", "steps", "wall_seconds", "startup_seconds", "reward_first", "reward_last", "eval_first", "eval_last",
    "samples_issued", "samples_trained", "samples_dropped", "samples_in_flight", "max_lag", "tokens_generated",
    "tokens_per_second", "weight_publishes", "restarts", "callback_failures",
}  # fmt: skip


class Remembers(Sink):
    def __init__(self, fail=()):
        super().__init__()
        self.calls, self.fail = [], set(fail)

    def open(self, run_dir, name, config):
        self._call("open", name)

    def metrics(self, step, values):
        self._call("metrics", step, dict(values))

    def samples(self, step, samples):
        self._call("samples", step, len(samples))

    def close(self):
        self._call("close")

    def _call(self, *what):
        self.calls.append(what)
        if what[0] in self.fail:
            raise RuntimeError("no network")


class Rewinds(Remembers):
    """A sink that removes the steps that were undone."""

    @property
    def rewinds(self):
        return [call[1:] for call in self.calls if call[0] == "rewind"]

    def rewind(self, step, last):
        self._call("rewind", step, last)


def metrics_of(sink):
    return [call[1:] for call in sink.calls if call[0] == "metrics"]


def recorder(run_dir, clock, **more):
    return Recorder(run_dir, clock=clock, wall=lambda: 1000.0 + clock.at, **more)


def log(run_dir):
    return [json.loads(line) for line in (run_dir.path / "events.jsonl").read_text().splitlines()]


def notes(run_dir):
    return [record for record in log(run_dir) if record["event"] == "logged"]


def test_a_whole_run_is_summed_up(run_dir, clock):
    write = recorder(run_dir, clock).write
    clock.at += 5
    write(RunStarted("r", str(run_dir.path), {"steps": 30}))
    write(EvalFinished(0, "hold-out", 0.25, 64, 1.0))
    for step in range(1, 31):
        clock.at += 2
        write(RolloutMeasured(step, {"tokens/generated": 100.0}))
        write(StepFinished(step, {"reward/mean": step / 100, "lag/max": float(step == 7), **BALANCE}))
        write(WeightsPublished(Version("policy", 0, step), 0.1, 10))
    write(EvalFinished(30, "hold-out", 0.75, 64, 1.0))
    write(RoleRecovered("rollout", 2.0))
    write(RunFinished("finished", {"samples_in_flight": 7}))
    summary = run_dir.read("summary")
    assert set(summary) >= SUMMARY_FIELDS
    assert summary["status"] == "finished" and summary["steps"] == 30
    assert (summary["wall_seconds"], summary["startup_seconds"]) == (65.0, 5.0)
    assert summary["reward_first"] == pytest.approx(0.055) and summary["reward_last"] == pytest.approx(0.255)
    assert summary["eval_first"] == {"set": "hold-out", "step": 0, "mean": 0.25, "n": 64, "temperature": 1.0}
    assert summary["eval_last"]["mean"] == 0.75
    assert (summary["samples_issued"], summary["samples_trained"], summary["samples_in_flight"]) == (40, 30, 7)
    assert summary["samples_dropped"] == {"stale": 2}
    assert (summary["max_lag"], summary["weight_publishes"], summary["restarts"]) == (1, 30, {"rollout": 1})
    assert summary["tokens_generated"] == 3000 and summary["tokens_per_second"] == pytest.approx(50.0)


def test_rollout_reports_join_their_steps_record(run_dir, clock):
    sink = Remembers()
    run = recorder(run_dir, clock, sinks={"mine": sink})
    run.write(RunStarted("r", "", {}))
    for mean, longest, tokens, scored in ((10.0, 30.0, 5.0, 1.0), (20.0, 25.0, 7.0, 3.0)):
        measured = {"length/mean": mean, "length/max": longest, "tokens/generated": tokens, "samples/scored": scored}
        lengths = (longest - 20, longest)  # the step's percentiles are those of its samples, not of its reports
        run.write(
            RolloutMeasured(1, measured, {"length": lengths, "truncated": (0, 1), "finished": (), "repeated": ()})
        )
    run.write(RolloutMeasured(2, {"length/mean": 99.0}))
    run.write(StepFinished(1, {"reward/mean": 0.5}))
    run.close()
    (line,) = run_dir.metrics()
    assert (line["length/mean"], line["length/max"], line["tokens/generated"]) == (17.5, 30.0, 12.0)
    assert (line["length/completion_p50"], line["length/completion_max"], line["length/truncated"]) == (17.5, 30.0, 0.5)
    values = {key: value for key, value in line.items() if "/" in key and key != "schema"}
    assert sink.calls[1] == ("metrics", 1, values)


def test_a_numbered_event_is_written_once(run_dir, clock):
    run = recorder(run_dir, clock)
    for number, step in ((1, 1), (2, 2), (1, 1), (2, 2)):
        run.handle(number, StepFinished(step, {"reward/mean": 0.5}))
    assert [line["step"] for line in run_dir.metrics()] == [1, 2]


@pytest.mark.parametrize(
    ("error", "status"),
    [(RelaxError("it broke"), "failed"), (KeyboardInterrupt(), "interrupted"), (None, "interrupted")],
)
def test_a_run_that_breaks_off_still_has_its_summary(run_dir, clock, error, status):
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, recorder(run_dir, clock) as run:
        run.write(StepFinished(1, {"reward/mean": 0.5, **BALANCE}))
        if error is not None:
            raise error
    summary = run_dir.read("summary")
    assert summary["status"] == status and summary["samples_issued"] == 40
    assert set(summary) >= SUMMARY_FIELDS
    assert summary.get("error", "") == ("it broke" if status == "failed" else "")
    assert run_dir.read("status")["state"] == status


def test_a_resumed_run_continues_counting(run_dir, clock):
    first = recorder(run_dir, clock)
    first.write(RunStarted("r", "", {}))
    first.write(EvalFinished(0, "hold-out", 0.25, 64, 0.5))
    for step in range(1, 6):
        clock.at += 1
        lags = {"lag/max": 2.0, "lag/samples/2": 8.0} if step == 5 else {"lag/samples/0": 5.0, "lag/samples/1": 3.0}
        first.write(StepFinished(step, {"reward/mean": step / 10, "tokens/generated": 10.0, **lags}))
        first.write(WeightsPublished(Version("policy", 0, step), 0.1, 10))
    first.close()
    clock.at += 1000
    again = RunDirectory.reopen(run_dir.path)
    again.rewind(4)
    second = recorder(again, clock)
    second.write(RunStarted("r", "", {}))
    clock.at += 2
    second.write(StepFinished(5, {"reward/mean": 0.9, "tokens/generated": 10.0, "lag/samples/1": 8.0}))
    summary = second.summary()
    assert summary["lag_histogram"] == {"0": 20, "1": 20}
    assert (summary["steps"], summary["tokens_generated"], summary["max_lag"]) == (5, 50, 0)
    assert summary["reward_first"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.9) / 5)
    assert summary["wall_seconds"] == pytest.approx(6.0) and summary["tokens_per_second"] == pytest.approx(5.0)
    assert summary["eval_first"]["temperature"] == 0.5 and summary["weight_publishes"] == 5
    second.close()


def test_events_that_were_dropped_are_counted_in_log_metrics_and_summary(run_dir, clock):
    run = recorder(run_dir, clock)
    run.write(StepFinished(1, {"reward/mean": 0.5}))
    run.handle(7, EventsDropped(7))
    run.handle(9, EventsDropped(2))
    run.write(StepFinished(2, {"reward/mean": 0.5}))
    run.heartbeats((Heartbeat("actor", "busy"),))
    first, second = run_dir.metrics()
    assert "events/dropped" not in first and second["events/dropped"] == 9.0
    assert [line["count"] for line in log(run_dir) if line["event"] == "events dropped"] == [7, 2]
    assert run.summary()["events_dropped"] == 9
    assert recorder(run_dir, clock).summary()["events_dropped"] == 9, "also where the run is resumed"
    run.rewind(1)
    assert run.summary()["events_dropped"] == 9


def test_a_rollback_in_a_later_stage_forgets_later_steps_of_that_stage_alone(run_dir, clock):
    run = recorder(run_dir, clock)
    for stage, first in (("warm-start", 0), ("rl", 3)):
        run.enter(stage, first)
        for step in (1, 2, 3):
            run.write(SamplesScored(step, ({"reward": 1.0},)))
            run.write(StepFinished(step, {"reward/mean": 0.1 * (step + first), "tokens/generated": 10.0}))
    run.write(RoleRecovered("actor", 1.0))
    run.write(RolledBack(1, Version("actor", 1, 1), "a rank died"))
    run.heartbeats([])
    assert [(line["step"], line["stage"]) for line in run_dir.metrics()] == [
        (1, "warm-start"), (2, "warm-start"), (3, "warm-start"), (4, "rl"),
    ]  # fmt: skip
    # Rows that step 4's weights sampled are on the bus, and trained again.
    assert run_dir.sample_steps() == [1, 2, 3, 4, 5]
    assert run.summary()["restarts"] == {"actor": 1}
    assert (run.summary()["steps"], run.summary()["tokens_generated"], run_dir.read("status")["step"]) == (4, 40, 4)
    run.write(StepFinished(2, {"reward/mean": 0.9, "tokens/generated": 10.0}))
    assert [line["step"] for line in run_dir.metrics()] == [1, 2, 3, 4, 5] and run.summary()["steps"] == 5


def test_a_sink_that_raises_three_times_is_paused_and_the_others_continue(run_dir, clock):
    bad, good = Remembers(fail={"metrics"}), Remembers()
    run = recorder(run_dir, clock, sinks={"bad": bad, "good": good})
    run.write(RunStarted("r", "", {}))
    for step in range(1, 6):
        run.write(StepFinished(step, {"reward/mean": 0.5}))
    run.close()
    assert [call[0] for call in bad.calls] == ["open", "metrics", "metrics", "metrics", "close"]
    assert [call[0] for call in good.calls] == ["open", *["metrics"] * 5, "close"]
    told = [record["message"] for record in notes(run_dir)]
    assert len(told) == 3 and told[-1] == "bad is paused for 60 s: it raised 3 times, last RuntimeError: no network"


def test_a_sink_that_cannot_open_is_off_at_once_and_the_run_continues(run_dir, clock):
    bad, good = Remembers(fail={"open"}), Remembers()
    with recorder(run_dir, clock, sinks={"bad": bad, "good": good}) as run:
        run.write(RunStarted("r", "", {}))
        run.write(StepFinished(1, {"reward/mean": 0.5}))
        run.write(RunFinished("finished", {}))
    assert bad.calls == [("open", run_dir.name)] and [call[0] for call in good.calls] == ["open", "metrics", "close"]
    assert [note["message"] for note in notes(run_dir)] == ["bad is off: it could not start: RuntimeError: no network"]
    assert run_dir.read("summary")["callback_failures"] == {"bad": 3}


class Exits(Remembers):
    """A sink that ends its process instead of raising, as command-line clients do."""

    def _call(self, *what):
        self.calls.append(what)
        if what[0] in self.fail:
            raise SystemExit(1)


@pytest.mark.parametrize(("fail", "calls", "failures"), [("open", 1, 7), ("metrics", 5, 5), ("close", 7, 1)])
def test_a_sink_that_exits_fails_like_a_sink_that_raises(run_dir, clock, fail, calls, failures):
    sink = Exits(fail={fail})
    with recorder(run_dir, clock, sinks={"exits": sink}) as run:
        run.write(RunStarted("r", "", {}))
        for step in range(1, 6):
            run.write(StepFinished(step, {"reward/mean": 0.5}))
        run.write(RunFinished("finished", {}))
    assert len(sink.calls) == calls
    assert "SystemExit: 1" in notes(run_dir)[-1]["message"]
    summary = run_dir.read("summary")
    assert summary["callback_failures"] == {"exits": failures} and summary["status"] == "finished"


def test_a_hanging_open_neither_delays_nor_ends_the_run_and_all_its_calls_count_as_failed(run_dir, clock):
    opening, release = threading.Event(), threading.Event()

    class Hangs(Remembers):
        def open(self, run_dir, name, config):
            opening.set()
            release.wait(300)

    sink, good = Hangs(), Remembers()
    with recorder(run_dir, clock, sinks={"hangs": sink, "good": good}, sink_call_s=5.0) as run:
        run.write(RunStarted("r", "", {}))  # returns, although the sink does not
        assert opening.wait(120)
        run.write(StepFinished(1, {"reward/mean": 0.5}))
        clock.at += 6
        run.heartbeats([])
        run.write(StepFinished(2, {"reward/mean": 0.5}))
        run.write(RunFinished("finished", {}))
    release.set()
    assert sink.calls == [] and [call[0] for call in good.calls] == ["open", "metrics", "metrics", "close"]
    assert run_dir.read("summary")["callback_failures"] == {"hangs": 4}
    assert [note["message"] for note in notes(run_dir)] == ["hangs is off: one call took longer than 5 s"]


def test_sinks_that_hang_at_the_end_share_one_deadline(run_dir, clock, monkeypatch):
    release, waits = threading.Event(), []

    class Hangs(Remembers):
        def close(self):
            release.wait(300)

    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda thread, wait_s: (waits.append(wait_s), join(thread, 0))[1])
    run = recorder(run_dir, clock, sinks={"one": Hangs(), "two": Hangs()}, deadline_s=100.0)
    run.write(RunStarted("r", "", {}))
    run.write(RunFinished("finished", {}))
    run.close()
    release.set()
    assert 100.0 >= waits[0] > waits[1], "the second wait ends when the first would have"
    failures = run_dir.read("summary")["callback_failures"]
    assert set(failures) == {"one", "two"}


def test_a_sink_that_was_never_opened_is_not_closed(run_dir, clock):
    sink = Remembers()
    with recorder(run_dir, clock, sinks={"mine": sink}) as run:
        run.write(RunFinished("failed", {}))
    assert sink.calls == [] and run_dir.read("summary")["callback_failures"] == {}


def test_sinks_are_told_of_the_steps_that_a_rollback_or_a_restart_undoes(run_dir, clock):
    marked, own = Remembers(), Rewinds()
    with recorder(run_dir, clock, sinks={"marked": marked, "own": own}) as run:
        run.write(RunStarted("r", "", {}))
        for step in (1, 2, 3):
            run.write(StepFinished(step, {"reward/mean": step / 8}))
        run.write(RolledBack(1, Version("actor", 0, 1), "a guard fired"))
        run.write(StepFinished(2, {"reward/mean": 1.0}))
        run.write(RolledBack(2, Version("actor", 0, 2), "nothing was trained since"))
        run.write(RunRestarted(0, "a role died", 1, 3))
        run.ready()
    assert own.rewinds == [(1, 3), (0, 2)]
    kept = [(step, values.get("reward/mean"), values.get(UNDONE)) for step, values in metrics_of(marked)]
    assert kept == [(1, 0.125, None), (2, 0.25, None), (3, 0.375, None), (1, None, 2.0), (2, 1.0, None), (0, None, 2.0)]


def test_sinks_of_a_later_stage_are_told_of_the_steps_of_the_whole_run(run_dir, clock):
    own = Rewinds()
    with recorder(run_dir, clock, sinks={"own": own}) as run:
        run.enter("rl", 3)
        run.write(RunStarted("r", "", {}))
        for step in (1, 2, 3):
            run.write(StepFinished(step, {"reward/mean": 0.5}))
        run.write(RolledBack(1, Version("actor", 0, 1), "a guard fired"))
    assert own.rewinds == [(4, 6)]


def test_sinks_of_a_resumed_run_are_told_of_the_steps_after_its_checkpoint_once_they_are_open(run_dir, clock):
    with recorder(run_dir, clock) as run:
        for step in (1, 2, 3):
            run.write(StepFinished(step, {"reward/mean": 0.5}))
    for checkpoint, undone in ((2, [(2, 3)]), (2, [])):
        own = Rewinds()
        with recorder(RunDirectory.reopen(run_dir.path), clock, sinks={"own": own}) as again:
            again.rewind(checkpoint)
            again.write(RunStarted("r", "", {}))
        assert own.rewinds == undone and [call[0] for call in own.calls] == ["open", *["rewind"] * len(undone), "close"]


def test_sinks_get_no_secrets(tmp_path, clock):
    run_dir = RunDirectory.create(tmp_path / "run", "maths", None, None, redactor=Redactor(["hunter2"]))
    seen = []

    class Keeps(Remembers):
        def open(self, run_dir, name, config):
            seen.append(config)

        def samples(self, step, samples):
            seen.extend(samples)

    with recorder(run_dir, clock, sinks={"mine": Keeps()}) as run:
        run.write(RunStarted("r", "", {"steps": 4, "sinks": [{"name": "mine", "url": "http://me:hunter2@host"}]}))
        run.write(SamplesScored(1, ({"response": "it is hunter2", "reward": 1.0},)))
    assert "hunter2" not in str(seen)
    assert seen[0]["steps"] == 4 and seen[1] == {"response": "it is [redacted]", "reward": 1.0}


def test_a_sink_that_takes_spans_gets_those_of_each_step_in_seconds_since_1970(run_dir, clock):
    class Traces(Remembers):
        def spans(self, step, spans):
            self._call("spans", step, list(spans))

    sink, plain = Traces(), Remembers()
    with recorder(run_dir, clock, sinks={"traces": sink, "plain": plain}) as run:
        run.write(RunStarted("r", "", {}))
        began = clock.at
        train = Span("actor", "work", "train", began + 1, began + 3)
        run.write(TimeSpent("actor", began + 4, (train,)))
        run.write(StepFinished(1, {"time/step_s": 4.0}, at=began + 4))
        run.heartbeats([])
        run.write(TimeSpent("actor", began + 5, ()))
    step, trained = next(call[2] for call in sink.calls if call[:2] == ("spans", 1))
    assert (step.track, step.name, trained.track, trained.name) == ("steps", "step 1", "actor", "train")
    assert (step.end - step.start, trained.start - step.start, step.end - trained.end) == pytest.approx((4, 1, 1))
    # The clock stands still, so the event of the step arrives at the moment that counts as the end of the step.
    assert step.end == pytest.approx(1000.0 + began)
    assert "spans" not in {call[0] for call in plain.calls}


def test_sinks_get_a_few_samples_and_the_run_directory_all(run_dir, clock):
    sink = Remembers()
    run = recorder(run_dir, clock, sinks={"mine": sink})
    run.write(RunStarted("r", "", {}))
    run.write(SamplesScored(1, tuple({"reward": 1.0, "n": n} for n in range(9))))
    run.write(EvalFinished(1, "hold-out", 0.5, 2, 1.0, {"std": 0.5}, ({"reward": 0.0},)))
    run.close()
    assert sink.calls[1] == ("samples", 1, 4)
    assert sink.calls[2][2]["eval/hold-out/std"] == 0.5
    kept = list(run_dir.samples(1))
    assert len(kept) == 10 and kept[-1]["purpose"] == "eval"


class Observer:
    def __init__(self):
        self.seen = []

    def relax_step_finished(self, event):
        self.seen.append(event)
        raise ValueError("mine")


def test_an_observer_that_raises_three_times_is_paused(run_dir, clock):
    observer = Observer()
    run = recorder(run_dir, clock, observers={"mine": observer})
    for step in range(1, 6):
        run.write(StepFinished(step, {"reward/mean": 0.5}))
    run.close()
    assert [event.step for event in observer.seen] == [1, 2, 3]
    (last,) = [record for record in notes(run_dir) if "is paused" in record["message"]]
    assert "test_recorder.py" in last["fields"]["frames"]


def test_work_that_observers_declare_counts_until_it_is_done_or_its_observer_is_paused(run_dir, clock):
    class Breaks(Observer):
        def relax_run_opened(self, event):
            return WorkAtEnd("a report", 60.0)

    sent = WorkAtEnd("an upload", 60.0)
    observers = {"steady": SimpleNamespace(relax_run_opened=lambda: sent), "broken": Breaks()}
    run = recorder(run_dir, clock, observers=observers)
    run.tell_observers(RunOpened("maths", str(run_dir.path), {}, str))
    for step in (1, 2, 3):
        run.write(StepFinished(step, {"reward/mean": 0.5}))
    run.close()  # ends the observers' threads
    assert run.work_at_end() == [sent]
    sent.done.set()
    assert run.work_at_end() == []


def test_the_states_of_roles_are_reported_seldom_and_the_close_of_the_run_comes_last(run_dir, clock):
    seen = []

    class Sees:
        def relax_run_opened(self, event):
            seen.append((event.name, event.redact("hunter2")))

        def relax_roles_reported(self, event):
            seen.append(event.heartbeats[0].role)

        def relax_run_closed(self, event):
            seen.append((event, sink.calls[-1], run_dir.read("summary")["callback_failures"]))

    sink = Remembers(fail=["close"])
    run = recorder(run_dir, clock, sinks={"mine": sink}, observers={"watch": Sees()})
    run.tell_observers(RunOpened("maths", str(run_dir.path), {}, Redactor(["hunter2"]).text))
    run.write(RunStarted("r", "", {}))
    for later_s in (0.0, 3.0, 3.0):
        clock.at += later_s
        run.heartbeats([Heartbeat("rollout", "waiting")])
    run.write(RunFinished("finished", {}))
    run.close()
    closed = RunClosed(str(run_dir.path), "finished")
    assert seen == [("maths", "[redacted]"), "rollout", "rollout", (closed, ("close",), {"mine": 1})]
    written = (run_dir.path / "events.jsonl").read_text()
    assert not any(f'"run {name}"' in written for name in ("opened", "closed")) and "roles reported" not in written


def test_a_hanging_observer_delays_no_other(run_dir, clock):
    started, release = threading.Event(), threading.Event()

    class Hangs:
        def relax_step_finished(self, event):
            started.set()
            release.wait(300)

    run = recorder(run_dir, clock, observers={"slow": Hangs()}, deadline_s=5.0)
    run.write(StepFinished(1, {"reward/mean": 0.5}))
    assert started.wait(120)
    clock.at += 6
    run.heartbeats([])
    run.write(StepFinished(2, {"reward/mean": 0.5}))
    run.close()
    release.set()
    assert [record["message"] for record in notes(run_dir)] == ["slow is off: one call took longer than 5 s"]


def test_roles_and_waits_are_live_in_the_status(run_dir, clock):
    run = recorder(run_dir, clock)
    run.write(RunStarted("r", "", {"steps": 9}))
    run.heartbeats([Heartbeat("rollout", "waiting", waits=(Wait("rollout", "a grant", "actor", 90.0, 150.0),))])
    status = run_dir.read("status")
    assert (status["state"], status["steps"], status["now"]) == ("running", 9, clock.at)
    assert status["roles"][0]["waits"] == [
        {
            "role": "rollout",
            "reason": "a grant",
            "blocked_by": "actor",
            "since": 90.0,
            "deadline": 150.0,
            "polls": False,
        }
    ]
    clock.at += 1
    run.heartbeats([Heartbeat("rollout", "busy", doing="generating")])
    assert run_dir.read("status")["roles"][0]["doing"] == "generating"


def test_failures_publishes_and_checkpoints_are_logged_and_traced(run_dir, clock):
    run = recorder(run_dir, clock)
    run.write(RoleFailed("rollout", "engine died", 4, False, frames="File x"))
    run.write(CheckpointSaved(3, "checkpoints/step-3", 0.5))
    run.write(Logged("warning", "actor", "slow disk", {"level": "odd", "seconds": 3}))
    run.write(TimeSpent("actor", clock.at + 2, (Span("actor", "work", "train", clock.at, clock.at + 2),)))
    run.finish("stopped")
    assert [(record["level"], record["event"]) for record in log(run_dir)] == [
        ("warning", "role failed"), ("info", "checkpoint saved"), ("warning", "logged"),
    ]  # fmt: skip
    said = log(run_dir)[-1]
    assert (said["role"], said["message"], said["fields"]) == ("actor", "slow disk", {"level": "odd", "seconds": 3})
    trace = run_dir.read("trace")["traceEvents"]
    tracks = {event["args"]["name"]: event["tid"] for event in trace if event["name"] == "thread_name"}
    (train,) = [event for event in trace if event["name"] == "train"]
    assert train["tid"] == tracks["actor"] and (train["ph"], train["ts"], train["dur"]) == ("X", 0, 2_000_000)


def test_a_terminal_that_went_away_does_not_stop_the_run(run_dir, clock):
    class Gone:
        def event(self, event):
            raise BrokenPipeError("gone")

        beats = close = event

    run = recorder(run_dir, clock, display=Gone())
    for step in (1, 2):
        run.write(StepFinished(step, {"reward/mean": 0.5}))
    run.close()
    assert [line["step"] for line in run_dir.metrics()] == [1, 2]
    assert [record["message"] for record in notes(run_dir)] == ["the display is off: gone"]


def test_a_run_without_steps_has_a_trace_and_a_summary(run_dir, clock):
    run = recorder(run_dir, clock)
    run.write(RunStarted("r", "", {}))
    with pytest.raises(RelaxError, match="got 'done'"):
        run.finish("done")
    run.write(RunFinished("interrupted", {}))
    assert run_dir.read("trace")["traceEvents"][0]["ph"] == "M"
    assert run_dir.read("summary")["reward_first"] is None


def test_the_evidence_of_a_guard_is_saved_before_its_step_is_undone(run_dir, clock):
    run = recorder(run_dir, clock)
    run.enter("rl", 10)
    for step, group in ((1, 3), (1, 4), (2, 5), (2, 6)):
        run.write(SamplesScored(step, ({"group_id": group, "reward": 1.0, "response": "hunter2"},)))
    window = ({"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": math.nan})
    evidence = {"metric": "reward/mean", "value": 0.1, "bound": 0.2, "since": 1, "window": window, "groups": (5, 4)}
    fired = GuardFired(2, "reward", "roll-back", "too small", evidence)
    for _ in range(2):
        run.write(fired)
        run.write(RolledBack(1, Version("actor", 1, 1), "guard reward"))
    assert sorted(path.name for path in (run_dir.path / "guards").iterdir()) == [
        "step-000012-reward", "step-000012-reward-2",
    ]  # fmt: skip
    folder = run_dir.path / "guards/step-000012-reward"
    said = read_document(folder / "evidence.json")
    assert (said["schema"], said["step"], said["since"], said["action"]) == ("relax.evidence/1", 12, 11, "roll-back")
    assert [(one["step"], one["reward/mean"]) for one in said["window"]] == [(11, 0.5), (12, None)]
    assert [sample["group_id"] for sample in read_frames(folder / "samples.jsonl.zst")] == [5, 4]
    assert run.summary()["guards"] == {"reward": 2}
    run.write(StepFinished(2, {"reward/mean": 0.4}))
    assert list(run_dir.metrics())[-1]["guards/reward"] == 2.0
    assert recorder(run_dir, clock).summary()["guards"] == {"reward": 2}, "also where the run is resumed"
    assert (folder / "config.toml").read_text() == (run_dir.path / "config.toml").read_text()
    fired = [record for record in log(run_dir) if record["event"] == "guard fired"]
    assert [(record["guard"], record["step"]) for record in fired] == [("reward", 12)] * 2
    assert fired[0]["folder"] == str(folder) and "evidence" not in fired[0]
