# SPDX-License-Identifier: Apache-2.0
"""The trace that Perfetto opens: named tracks, whole spans, steps as arguments, counters."""

from relax_core.api.events import Span
from relax_core.observe.spans import Trace


def spans(document, name):
    return [event for event in document["traceEvents"] if event["name"] == name and event["ph"] == "X"]


def test_tracks_have_names_and_belong_to_their_process():
    trace = Trace(100.0)
    trace.add(
        [
            Span("actor", "work", "training", 100.0, 101.0),
            Span("rank-0", "work", "forward", 100.5, 101.0, "", ("gpu:0",)),
        ]
    )
    events = trace.document()["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    tracks = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"actor": names["roles"], "rank-0": names["devices"]}


def test_parts_of_a_span_from_several_heartbeats_are_one_span():
    trace = Trace(100.0)
    for start in (100.0, 100.5, 101.0):
        trace.add([Span("actor", "wait", "rows", start, start + 0.5, "rollout")])
    trace.add([Span("actor", "wait", "rows", 102.0, 103.0, "rollout")])
    found = spans(trace.document(), "waits for rows")
    assert [(event["ts"], event["dur"]) for event in found] == [(0, 1_500_000), (2_000_000, 1_000_000)]
    assert found[0]["args"] == {"kind": "wait", "blocked_by": "rollout"}


def test_a_span_carries_the_step_it_began_in_and_counters_follow_the_steps():
    trace = Trace(100.0)
    trace.add([Span("actor", "work", f"training {at}", 100.0 + at, 101.0 + at) for at in range(3)])
    trace.step(7, 100.0, 101.0, {"lag": {"lag/max": 1.0}, "rows": {}})
    trace.step(8, 101.0, 102.0, {"lag": {"lag/max": 2.0}})
    document = trace.document()
    assert [spans(document, f"training {at}")[0]["args"].get("step") for at in range(3)] == [7, 8, None]
    counters = [(event["ts"], event["args"]) for event in document["traceEvents"] if event["ph"] == "C"]
    assert counters == [(1_000_000, {"lag/max": 1.0}), (2_000_000, {"lag/max": 2.0})]


def test_overlapping_spans_are_on_separate_tracks():
    trace = Trace(100.0)
    for version, start, end in ((1, 100.0, 102.0), (2, 101.0, 102.5), (3, 101.5, 103.0), (4, 102.0, 104.0)):
        trace.span(f"publish {version}", "weights", start, end)
    events = trace.document()["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = {event["name"]: names[event["tid"]] for event in events if event["ph"] == "X"}
    assert list(tracks.values()) == ["weights", "weights 2", "weights 3", "weights"]
