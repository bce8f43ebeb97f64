# SPDX-License-Identifier: Apache-2.0
"""The Prometheus sink: an HTTP endpoint with the newest value of every metric of the run.

The metric `reward/mean` becomes `relax_reward_mean{run="...", key="reward/mean"}`. Prometheus forbids most punctuation
in names; the label `key` holds the exact name, so two metrics never become one series.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from relax_core.api import ConfigError, Options, Sink
from relax_core.api.errors import printable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

ALL_INTERFACES = ("0.0.0.0", "::")
"""Hosts that mean every interface of the machine; other machines then use the machine's name."""


class PrometheusOptions(Options):
    host: str = "127.0.0.1"
    """Address of the endpoint. It asks for no password, so choose another address only in a network that you trust."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the endpoint; 0: a free port, written to the file in `targets`."""
    targets: str = "prometheus"
    """Folder of the file from which Prometheus learns the endpoint; a relative path starts in the run directory."""


class Prometheus(Sink[PrometheusOptions]):
    """A sink that Prometheus scrapes. The endpoint exists from `open` to `close`."""

    def __init__(self, options: PrometheusOptions | None = None) -> None:
        super().__init__(options)
        self.address = ""
        """`host:port` of the endpoint; empty if the sink is not open."""
        self._info: dict[str, str] = {}
        self._step, self._values = 0, dict[str, float]()
        self._lock = threading.Lock()
        """Guards `_step` and `_values`, which the server's threads read."""
        self._server: Any = None
        self._target = Path()

    def check(self) -> None:
        host, port = self.options.host, self.options.port
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            fix = f"{error.strerror or error}; choose an address of this machine, and a free port or 0"
            raise ConfigError("sinks.prometheus", f"{host}:{port}", fix) from error

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        model, algorithm = config.get("model", {}).get("path", ""), config.get("algorithm", {}).get("name", "")
        labels = {"run": name, "model": str(model), "algorithm": str(algorithm)}
        self._info = {key: printable(value) for key, value in labels.items()}
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]  # any object with `collect` is a collector
        self._server, _ = start_http_server(self.options.port, self.options.host, registry)
        host = socket.gethostname() if self.options.host in ALL_INTERFACES else self.options.host
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        # The file for Prometheus's `file_sd_configs`. Prometheus labels series with the address by default. The run's
        # name replaces the address, so that a resumed run continues its series although its port may have changed.
        path = Path(run_dir) / self.options.targets / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".part")
        new.write_text(
            json.dumps([{"targets": [self.address], "labels": {"instance": printable(name)}}]), encoding="utf-8"
        )
        os.replace(new, path)
        self._target = path

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._step = step
            self._values.update(values)

    def close(self) -> None:
        if self._server is not None:
            self._target.unlink(missing_ok=True)
            self._server.shutdown()
            self._server.server_close()
            self._server, self.address = None, ""

    def collect(self) -> Iterator[Metric]:
        """Return all metrics; prometheus_client calls this method for each scrape."""
        from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

        with self._lock:
            step, values = self._step, dict(self._values)
        run = self._info["run"]
        yield InfoMetricFamily("relax", "The run, its model and its algorithm", self._info)
        newest = GaugeMetricFamily("relax_step", "Newest step", labels=["run"])
        newest.add_metric([run], step)
        families = {newest.name: newest}
        for key, value in values.items():
            name = "relax_" + re.sub(r"\W", "_", key, flags=re.ASCII)
            family = families.setdefault(
                name, GaugeMetricFamily(name, f"Relax metric {printable(key)}", labels=["run", "key"])
            )
            family.add_metric([run, printable(key)], value)
        yield from families.values()
