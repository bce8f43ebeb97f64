# SPDX-License-Identifier: Apache-2.0
"""What another machine's role tells is put on the hub's clock, as near as its quickest beat."""

from relax_core.api.events import Span
from relax_core.api.role import Heartbeat, Wait
from relax_core.runners.run_status import ClockOffsets


def heartbeat(sent, *spans, waits=()):
    return Heartbeat("actor", "busy", waits=waits, pid=7, sent=sent, spans=spans)


def span(start, end):
    return Span("actor", "work", "training", start, end)


def test_the_fastest_heartbeat_sets_the_difference_of_the_clocks():
    clocks = ClockOffsets()
    slow = clocks.translate(heartbeat(1000.0, span(999.0, 1000.0)), 50.5)
    quick = clocks.translate(heartbeat(1001.0, span(1000.0, 1001.0)), 51.01)
    late = clocks.translate(heartbeat(1002.0, waits=(Wait("actor", "rows", "rollout", 1001.5, 1011.5),)), 53.0)
    assert (slow.sent, round(quick.sent, 6), round(late.sent, 6), late.at) == (50.5, 51.01, 52.01, 53.0)
    assert (round(late.waits[0].since, 6), round(late.waits[0].deadline, 6)) == (51.51, 61.51)


def test_spans_do_not_overlap_after_a_better_clock_difference():
    clocks = ClockOffsets()
    (first,) = clocks.translate(heartbeat(1000.0, span(999.0, 1000.0)), 50.5).spans
    (second,) = clocks.translate(heartbeat(1001.0, span(1000.0, 1001.0)), 51.01).spans
    assert first.end == second.start == 50.5 and round(second.end, 6) == 51.01


def test_a_heartbeat_without_a_time_is_not_translated():
    said = Heartbeat("actor", "waiting", waits=(Wait("actor", "rows", "rollout", 1.0, 2.0),))
    told = ClockOffsets().translate(said, 50.0)
    assert (told.waits, told.at) == (said.waits, 50.0)
