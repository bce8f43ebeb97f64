# SPDX-License-Identifier: Apache-2.0
"""What a collector receives: a real HTTP server reads the requests with the messages of OpenTelemetry."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from relax_plugin_opentelemetry.sink import OpenTelemetry, OpenTelemetryOptions

from relax_core.testing.sink import CONFIG, SPANS, SinkSuite, metrics


class Collector:
    """A collector that keeps the requests, and answers with `status`."""

    def __init__(self) -> None:
        self.status, self.requests = 200, list[tuple[str, Any]]()
        self.resource: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                kind = ExportMetricsServiceRequest if self.path == "/v1/metrics" else ExportTraceServiceRequest
                collector.requests.append((self.path, kind.FromString(body)))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def points(self) -> dict[tuple[str, str], list[float]]:
        """Return the values of each gauge in order, by name and `key`."""
        found: dict[tuple[str, str], list[float]] = {}
        for path, request in self.requests:
            for resource in request.resource_metrics if path == "/v1/metrics" else ():
                self.resource = plain(resource.resource.attributes)
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        for point in metric.gauge.data_points:
                            value = point.as_double if point.HasField("as_double") else point.as_int
                            key = plain(point.attributes).get("key", "")
                            found.setdefault((metric.name, key), []).append(value)
        return found

    def spans(self) -> list[Any]:
        requests = [request for path, request in self.requests if path == "/v1/traces"]
        return [s for r in requests for res in r.resource_spans for scope in res.scope_spans for s in scope.spans]


def plain(attributes: Any) -> dict[str, Any]:
    return {
        each.key: [v.string_value for v in each.value.array_value.values]
        if each.value.HasField("array_value")
        else getattr(each.value, each.value.WhichOneof("value"))
        for each in attributes
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def collector(server: Collector) -> Collector:
    server.status = 200
    server.requests.clear()
    return server


def opened(collector: Collector, name: str = "run", **options: Any) -> OpenTelemetry:
    sink = OpenTelemetry(OpenTelemetryOptions(endpoint=collector.url, **options))
    sink.open("unused", name, CONFIG)
    return sink


class TestOpenTelemetry(SinkSuite):
    component = "opentelemetry"
    test_the_same_input_gives_the_same_result = None  # the sink stores nothing; the tests below read what it sends
    test_a_resumed_run_replaces_the_steps_after_its_checkpoint = None

    @pytest.fixture(autouse=True, scope="class")
    def address(self, server: Collector) -> Iterator[None]:
        """Name the collector in OpenTelemetry's own variable, which the default options take."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
            yield


def test_the_collector_gets_each_step_of_each_metric_under_the_name_of_the_run(collector):
    sink = opened(collector, "my-run")
    sink.metrics(1, metrics(1))
    sink.metrics(2, metrics(2) | {"eval/a b/mean": 0.25, "eval/a,b/mean": 0.75})
    sink.close()
    points = collector.points()
    assert points["relax.step", ""] == [1, 2]
    assert points["relax.reward/mean", "reward/mean"] == [0.125, 0.25]
    assert points["relax.eval/a_b/mean", "eval/a b/mean"] == [0.25]
    assert points["relax.eval/a_b/mean", "eval/a,b/mean"] == [0.75]
    about = {"service.name": "relax", "service.instance.id": "my-run", "relax.model.path": "models/tiny"}
    assert about.items() <= collector.resource.items()


def test_a_step_is_one_trace_with_the_work_and_the_waits_of_each_track(collector):
    sink = opened(collector)
    sink.spans(1, SPANS)
    sink.spans(2, SPANS[:1])
    sink.close()
    *parts, step, second = collector.spans()
    assert (step.name, step.parent_span_id, plain(step.attributes)) == ("step 1", b"", {"relax.step": 1})
    assert {part.parent_span_id for part in parts} == {step.span_id}
    assert {part.trace_id for part in parts} == {step.trace_id} != {second.trace_id}
    wait, forward = parts
    assert (wait.name, plain(wait.attributes)) == ("waits for rows", {
        "relax.step": 1, "relax.track": "actor", "relax.kind": "wait", "relax.blocked_by": "rollout",
    })  # fmt: skip
    assert forward.name == "forward" and plain(forward.attributes)["relax.devices"] == ["cpu:0"]
    second_s = 10**9
    assert (wait.start_time_unix_nano, wait.end_time_unix_nano) == (17 * 10**17, 17 * 10**17 + 3 * second_s // 2)
    assert step.end_time_unix_nano - step.start_time_unix_nano == 4 * second_s


def test_metrics_or_spans_can_be_left_out(collector):
    for options, paths in (({"spans": False}, {"/v1/metrics"}), ({"metrics": False}, {"/v1/traces"})):
        collector.requests.clear()
        sink = opened(collector, **options)
        sink.metrics(1, metrics(1))
        sink.spans(1, SPANS)
        sink.close()
        assert {path for path, _ in collector.requests} == paths


def test_what_the_collector_refuses_is_a_failed_call_and_is_not_sent_again(collector):
    sink = opened(collector)
    collector.status = 400
    with pytest.raises(RuntimeError, match="did not take the metrics of step 1"):
        sink.metrics(1, metrics(1))
    with pytest.raises(RuntimeError, match="did not take the trace of step 1"):
        sink.spans(1, SPANS)
    collector.status = 200
    collector.requests.clear()
    sink.metrics(2, metrics(2))
    sink.spans(2, SPANS[:1])
    sink.close()
    assert collector.points()["relax.reward/mean", "reward/mean"] == [0.25]
    assert [span.name for span in collector.spans()] == ["step 1"] and len(collector.requests) == 2
