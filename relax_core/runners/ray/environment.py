# SPDX-License-Identifier: Apache-2.0
"""Ray's environment variables, which must be set before ray is imported. This module does not import ray.

Variables that the user has set are kept. For a cluster of the run's own, one variable is a secret token, which the
cluster's processes inherit: without a token, every process that can reach one of Ray's ports could run code.
"""

from __future__ import annotations

import os
import secrets
import sys

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # the monitor would kill the run's processes if other programs fill memory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # at the default of 15, a run would hardly start on a busy machine
    "RAY_SCHEDULER_EVENTS": "0",
}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's setting for a cluster of one machine: every port binds to 127.0.0.1."""


def settle() -> None:
    """Set the variables that Ray reads at import. If ray is already imported, do nothing."""
    if "ray" in sys.modules:
        return
    own = {} if joins() else LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in (SETTINGS | own).items():
        os.environ.setdefault(name, value)


def joins() -> bool:
    """Return True if RAY_ADDRESS names a running cluster to join."""
    return bool(os.environ.get("RAY_ADDRESS"))
