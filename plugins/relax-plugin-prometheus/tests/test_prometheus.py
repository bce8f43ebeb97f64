# SPDX-License-Identifier: Apache-2.0
"""What a scrape of the endpoint returns, read by the parser of prometheus_client."""

import json
import math
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from relax_plugin_prometheus.sink import Prometheus, PrometheusOptions

from relax_core.api import ConfigError
from relax_core.testing.sink import CONFIG, SinkSuite, metrics

Labels = frozenset[tuple[str, str]]


def scrape(address: str) -> dict[tuple[str, Labels], float]:
    with urlopen(f"http://{address}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "a series is there twice"
    return found


def series(key: str, run: str = "run") -> Labels:
    return frozenset({"run": run, "key": key}.items())


@pytest.fixture
def sink(tmp_path: Path):
    made = Prometheus()
    made.check()
    made.open(str(tmp_path), "run", CONFIG | {"algorithm": {"name": "grpo"}})
    yield made
    made.close()


class TestPrometheus(SinkSuite):
    component = "prometheus"
    test_the_same_input_gives_the_same_result = None  # the sink stores nothing
    test_a_resumed_run_replaces_the_steps_after_its_checkpoint = None


def test_a_scrape_returns_the_newest_value_of_every_metric(sink):
    sink.metrics(1, metrics(1))
    sink.metrics(2, {"reward/mean": 0.75})
    found = scrape(sink.address)
    assert found["relax_reward_mean", series("reward/mean")] == 0.75
    assert found["relax_samples_dropped_stale", series("samples/dropped/stale")] == 0.0
    assert found["relax_time_step_s", series("time/step_s")] == 0.5
    assert found["relax_step", frozenset({("run", "run")})] == 2
    about = {"run": "run", "model": "models/tiny", "algorithm": "grpo"}
    assert found["relax_info", frozenset(about.items())] == 1


def test_metrics_whose_names_prometheus_cannot_tell_apart_stay_apart(sink):
    sink.metrics(1, {"eval/a b/mean": 0.25, "eval/a-b/mean": 0.5, "eval/é/mean": math.nan, "mine/x": math.inf})
    found = scrape(sink.address)
    assert found["relax_eval_a_b_mean", series("eval/a b/mean")] == 0.25
    assert found["relax_eval_a_b_mean", series("eval/a-b/mean")] == 0.5
    assert math.isnan(found["relax_eval___mean", series("eval/é/mean")])
    assert found["relax_mine_x", series("mine/x")] == math.inf


def test_prometheus_finds_the_endpoint_under_the_name_of_the_run_until_the_sink_closes(sink, tmp_path):
    target = tmp_path / "prometheus" / "run.json"
    assert json.loads(target.read_text()) == [{"targets": [sink.address], "labels": {"instance": "run"}}]
    address = sink.address
    sink.close()
    assert list(target.parent.iterdir()) == []
    with pytest.raises(OSError):
        scrape(address)


def test_two_runs_have_an_endpoint_and_a_file_each(sink, tmp_path):
    other = Prometheus(PrometheusOptions(targets=str(tmp_path / "prometheus")))
    other.open(str(tmp_path / "other"), "other", {})
    try:
        other.metrics(1, {"reward/mean": 1.0})
        assert scrape(other.address)["relax_reward_mean", series("reward/mean", "other")] == 1.0
        assert sorted(path.name for path in (tmp_path / "prometheus").iterdir()) == ["other.json", "run.json"]
    finally:
        other.close()


def test_a_port_in_use_is_refused_before_the_run_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"sinks\.prometheus: got 127\.0\.0\.1:{port}; .*in use; choose"):
            Prometheus(PrometheusOptions(port=port)).check()


def test_only_this_machine_reaches_the_endpoint_unless_a_host_is_chosen(sink):
    assert sink.address.startswith("127.0.0.1:")
    everywhere = Prometheus(PrometheusOptions(host="0.0.0.0"))
    everywhere.check()
    everywhere.open(str(sink._target.parent), "everywhere", {})
    try:
        assert everywhere.address.partition(":")[0] == socket.gethostname()
    finally:
        everywhere.close()
