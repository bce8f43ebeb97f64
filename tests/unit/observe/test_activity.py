# SPDX-License-Identifier: Apache-2.0
"""What one track does: spans that meet, never overlap, and are told once."""

from contextlib import ExitStack

from hypothesis import given, strategies as st

from relax_core.observe.spans import RESOLUTION_S, SpanRecorder
from tests.clocks import HandClock


def track(clock, devices=()):
    return SpanRecorder("track", clock, devices)


def told(activity):
    return [(span.kind, span.name, span.start - 100.0, span.end - 100.0) for span in activity.take()]


def test_a_role_is_busy_with_what_it_does_except_while_it_waits():
    clock = HandClock()
    role = track(clock)
    role.rest("training")
    clock.at += 2
    with role.span("wait", "rows", "rollout"):
        clock.at += 3
    clock.at += 1
    assert told(role) == [("work", "training", 0, 2), ("wait", "rows", 2, 5), ("work", "training", 5, 6)]
    assert told(role) == []


def test_sections_side_by_side_are_one_time_of_work_and_outside_of_them_a_role_is_idle():
    clock = HandClock()
    role = track(clock)
    role.rest("ready")
    with ExitStack() as waits:
        waits.enter_context(role.span("wait", "leave", "actor"))
        clock.at += 1
        with role.section("generating"):
            clock.at += 1
            with role.section("judging"):
                clock.at += 1
            clock.at += 1
        clock.at += 1
    clock.at += 5
    assert told(role) == [("wait", "leave", 0, 1), ("work", "generating", 1, 4), ("wait", "leave", 4, 5)]


def test_an_engine_that_loads_weights_while_it_generates_works():
    clock = HandClock()
    engine = track(clock, ("gpu:0",))
    with engine.span("overhead", "loading"):
        clock.at += 1
        engine.say("generating")
        clock.at += 1
    engine.say("")
    clock.at += 1
    assert told(engine) == [("overhead", "loading", 0, 1), ("work", "generating", 1, 2)]


def test_a_very_short_state_is_added_to_the_span_before_it():
    clock = HandClock()
    role = track(clock)
    role.rest("training")
    clock.at += 1
    with role.span("wait", "a moment"):
        clock.at += RESOLUTION_S / 2
    clock.at += 1
    (only,) = role.take()
    assert (only.name, only.start, only.end) == ("training", 100.0, clock.at)


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "say", "rest", "take"]), st.floats(0, 2)), max_size=40))
def test_spans_are_in_order_and_never_overlap(moves):
    clock = HandClock()
    role, spans, opened = track(clock), [], []
    for number, (move, seconds) in enumerate(moves):
        if move == "open":
            opened.append(role.span(("work", "overhead", "wait")[number % 3], str(number)))
            opened[-1].__enter__()
        elif move == "close" and opened:
            opened.pop(number % len(opened)).__exit__(None, None, None)
        elif move == "say":
            role.say("x" * (number % 2))
        elif move == "rest":
            role.rest(str(number))
        elif move == "take":
            spans += role.take()
        clock.at += seconds
    spans += role.take()
    assert all(one.end <= other.start for one, other in zip(spans, spans[1:], strict=False))
    assert all(100.0 <= span.start < span.end <= clock.at for span in spans)


def test_a_wait_that_holds_all_work_is_not_work_though_sections_are_open():
    clock = HandClock()
    role = track(clock)
    with role.section("generating"):
        clock.at += 1
        with role.span("wait", "the devices", "actor", holds=True):
            clock.at += 2
        clock.at += 1
    assert told(role) == [("work", "generating", 0, 1), ("wait", "the devices", 1, 3), ("work", "generating", 3, 4)]
