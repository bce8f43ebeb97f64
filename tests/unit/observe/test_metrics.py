# SPDX-License-Identifier: Apache-2.0
"""The registry of metric keys: unambiguous, documented, and right about combining."""

import re
from pathlib import Path

from hypothesis import given, settings, strategies as st

from relax_core.observe.metrics import METRICS, MeasuredMetric, metric


def test_keys_are_group_and_name_and_documented():
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    for known in METRICS:
        assert re.fullmatch(r"[a-z_]+(/[a-z_0-9]+|/<[a-z]+>|/<[a-z]+>_s|/[a-z_]+_<[a-z]+>)+", known.key), known.key
        assert known.help and not known.help.endswith(".") and f"| `{known.key}` |" in page, known.key
    assert len({known.key for known in METRICS}) == len(METRICS)


def test_a_literal_key_wins_over_a_pattern():
    assert metric("reward/mean").key == "reward/mean"
    assert metric("reward/maths").key == "reward/<component>"
    assert metric("eval/hold-out/mean").key == "eval/<set>/mean"
    assert metric("eval/hold-out/pass_at_4").key == "eval/<set>/<name>"
    assert metric("time/reward_s").key == "time/<part>_s"
    assert metric("samples/dropped/stale").combine == "last"
    assert metric("mine/thing") is None


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(-1e3, 1e3)), min_size=1, max_size=20))
def test_means_are_weighted_by_the_samples_they_are_means_of(reports):
    measured = MeasuredMetric()
    for scored, mean in reports:
        measured.add({"samples/scored": scored, "length/mean": mean, "mine/thing": mean, "length/max": mean})
    values, total = measured.values(), sum(scored for scored, _ in reports)
    expected = sum(scored * mean for scored, mean in reports) / total
    assert abs(values["length/mean"] - expected) < 1e-6
    assert values["mine/thing"] == values["length/mean"]
    assert values["length/max"] == max(mean for _, mean in reports)
    assert values["samples/scored"] == total


def test_a_report_without_a_key_does_not_dilute_it():
    measured = MeasuredMetric()
    measured.add({"samples/scored": 4, "reward/maths": 1.0})
    measured.add({"samples/scored": 12})
    assert measured.values()["reward/maths"] == 1.0
