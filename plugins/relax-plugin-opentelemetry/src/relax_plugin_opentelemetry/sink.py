# SPDX-License-Identifier: Apache-2.0
"""The OpenTelemetry sink: sends metrics, and the work and waits of each step as a trace, to a collector over OTLP.

The SDK's own export threads log failures and continue. This sink exports in its calls instead, so that a failed export
counts as a failed call of the sink.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from relax_core.api import Options, Sink, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter


class OpenTelemetryOptions(Options):
    endpoint: str = Field("", pattern=r"^(https?://.+)?$")
    """Base URL of a collector for OTLP over HTTP; empty: `OTEL_EXPORTER_OTLP_ENDPOINT`, by default http://localhost:4318."""
    metrics: bool = True
    """True: send metrics; False: for a collector of traces only."""
    spans: bool = True
    """True: send a trace of each step."""
    service: str = "relax"
    """Name of the service under which the collector shows all runs; a run is an instance of the service."""


class OpenTelemetry(Sink[OpenTelemetryOptions]):
    """A sink that sends to an OpenTelemetry collector; OpenTelemetry's own variables, `OTEL_*`, have their effect."""

    def __init__(self, options: OpenTelemetryOptions | None = None) -> None:
        super().__init__(options)
        self._metrics: _Metrics | None = None
        self._traces: _Traces | None = None

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        base = self.options.endpoint.rstrip("/")
        about = {"service.name": self.options.service, "service.instance.id": name}
        for table, key in (("model", "path"), ("algorithm", "name")):
            if value := config.get(table, {}).get(key):
                about[f"relax.{table}.{key}"] = str(value)
        if self.options.metrics:
            self._metrics = _Metrics(OTLPMetricExporter(f"{base}/v1/metrics" if base else None), about)
        if self.options.spans:
            self._traces = _Traces(OTLPSpanExporter(f"{base}/v1/traces" if base else None), about)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.send(step, values)

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        if self._traces is not None:
            self._traces.send(step, spans)

    def close(self) -> None:
        for part in (self._metrics, self._traces):
            if part is not None:
                part.close()
        self._metrics = self._traces = None


class _Metrics:
    """A gauge for each metric; `send` exports the values of one step."""

    def __init__(self, exporter: MetricExporter, about: Mapping[str, str]) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        self._exporter, self._reader = exporter, InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], resource=Resource.create(dict(about)), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("relax")
        self._gauges: dict[str, Any] = {}

    def send(self, step: int, values: Mapping[str, float]) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._set("relax.step", step, {})
        for key, value in values.items():
            # The name of an instrument allows few characters; the attribute keeps different metrics apart.
            self._set("relax." + re.sub(r"[^\w./-]", "_", key, flags=re.ASCII), value, {"key": key})
        data = self._reader.get_metrics_data()
        if data is not None and self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise RuntimeError(f"the collector did not take the metrics of step {step}")

    def close(self) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()

    def _set(self, name: str, value: float, attributes: Mapping[str, str]) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        self._gauges[name].set(value, attributes)


class _Traces:
    """A trace for each step: the step, and in it the work and the waits of each track."""

    def __init__(self, exporter: SpanExporter, about: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter, self._ended = exporter, InMemorySpanExporter()
        self._provider = TracerProvider(resource=Resource.create(dict(about)), shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = self._provider.get_tracer("relax")

    def send(self, step: int, spans: Sequence[Span]) -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.trace import set_span_in_context

        whole, *parts = spans
        root = self._tracer.start_span(
            whole.name, Context(), attributes={"relax.step": step}, start_time=_nanoseconds(whole.start)
        )
        inside = set_span_in_context(root, Context())
        for part in parts:
            name = f"waits for {part.name}" if part.kind == "wait" else part.name
            about = {"relax.step": step, "relax.track": part.track, "relax.kind": part.kind}
            about |= {"relax.blocked_by": part.blocked_by} if part.blocked_by else {}
            about |= {"relax.devices": part.devices} if part.devices else {}
            span = self._tracer.start_span(name, inside, attributes=about, start_time=_nanoseconds(part.start))
            span.end(_nanoseconds(part.end))
        root.end(_nanoseconds(whole.end))
        ended = self._ended.get_finished_spans()
        self._ended.clear()
        if ended and self._exporter.export(ended) is not SpanExportResult.SUCCESS:
            raise RuntimeError(f"the collector did not take the trace of step {step}")

    def close(self) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
