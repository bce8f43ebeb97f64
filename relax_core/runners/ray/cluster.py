# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster of a run: joined where one is named, else started for this run alone and ended with it."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import ray
from ray import serve

from relax_core.api.errors import InfrastructureError

NAMESPACE = "relax"
OBJECT_STORE_BYTES = 512 << 20
"""Of a cluster of our own; Ray's default is a third of the machine's memory."""
LOGICAL_CPUS = 64
"""Bookkeeping only: roles and workers ask for none, Serve's own actors for some."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it kills our processes for other people's memory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SCHEDULER_EVENTS": "0",
}


class Cluster:
    """Our connection to Ray."""

    def __init__(self) -> None:
        self._ours = False
        self._connected = False

    def connect(self) -> None:
        """Join `RAY_ADDRESS`, else start a local cluster. Raises InfrastructureError with Ray's reason."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._ours = not os.environ.get("RAY_ADDRESS") and not ray.is_initialized()
        try:
            if not ray.is_initialized():
                self._init()
            serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False, "log_level": "ERROR"})
        except Exception as error:
            self.close()
            raise InfrastructureError(f"ray: could not start or join a cluster: {error}; try --runner local") from error

    def _init(self) -> None:
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
        if not self._ours:
            ray.init(**options)
        else:
            ray.init(
                **options, num_cpus=LOGICAL_CPUS, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False,
                address="local",
            )  # fmt: skip
        self._connected = True

    def close(self) -> None:
        """End a cluster of our own; leave another as it was."""
        if self._connected and ray.is_initialized():
            ray.shutdown()
        self._connected = False
