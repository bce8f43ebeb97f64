# SPDX-License-Identifier: Apache-2.0
"""The environment variables that Ray must find before it is imported, since it reads them once, then. Imports no ray itself.

Whatever a person has set stays as it is. The processes of a cluster of our own inherit it, with a token that only they know:
without one, whoever reaches a port of Ray runs code.
"""

from __future__ import annotations

import os
import secrets
import sys

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it kills our processes for other people's memory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # 15 by default: beside other work on the machine a run would hardly start
    "RAY_SCHEDULER_EVENTS": "0",
}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's own word for a cluster of one machine: every port binds to 127.0.0.1."""


def settle() -> None:
    """Set what Ray reads when it is imported; where it has been, nothing can be changed any more."""
    if "ray" in sys.modules:
        return
    own = {} if joins() else LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in (SETTINGS | own).items():
        os.environ.setdefault(name, value)


def joins() -> bool:
    """Tell whether a cluster is named that others started."""
    return bool(os.environ.get("RAY_ADDRESS"))
