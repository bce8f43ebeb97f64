# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of a run's own on this machine: started by the run's process, or by one that holds it for that process.

What Ray starts ends with the process that started it. Where a supervisor replaces the run's process, a *holder* starts the
cluster, as a child of the process that comes first: once that one is killed, the supervisor is its parent. The supervisor
learns of it by a line of standard output, and names it to the successor in `RELAX_HELD_CLUSTER`. The holder ends when it is
told to, and when neither of the two is its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import psutil
import ray

from relax_core.runners.ray.connection import NAMESPACE
from relax_core.runners.ray.environment import HELD_CLUSTER, HELD_CLUSTER_SCHEMA
from relax_core.runners.ray.reaper import Reaper

OBJECT_STORE_BYTES = 512 << 20
"""Ray's default is a third of the machine's memory."""
LOGICAL_CPUS = 64
"""Bookkeeping only: roles and workers ask for none, Serve's own actors for some."""
START_TRIES, NODE_TIMED_OUT = 2, "timed out during startup"
"""A raylet ends when its own agent takes 15 s to start, as it may on a busy machine."""
CLOSE_S, LOOK_S = 30.0, 0.25
INIT: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}


def start_cluster() -> Callable[[], None]:
    """Start a cluster that ends with this process, also where it is killed; return what ends it."""
    options = INIT | {"num_cpus": LOGICAL_CPUS, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    for left in reversed(range(START_TRIES)):
        reaper = Reaper.start()
        try:
            ray.init(**options, address="local")
        except BaseException as error:
            reaper.close()
            if NODE_TIMED_OUT not in str(error) or not left:
                raise
        else:
            reaper.started()
            break

    def end() -> None:
        ray.shutdown()
        reaper.close()

    return end


@dataclass(frozen=True, slots=True)
class ClusterHolder:
    """A process that holds a cluster, as the run's process knows it."""

    process: psutil.Process
    address: str

    @classmethod
    def find(cls) -> Self | None:
        """Find the one that held the cluster of the process before; None where there was none, or it has ended."""
        pid, _, address = os.environ.get(HELD_CLUSTER, "").partition(" ")
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            process = psutil.Process(int(pid))
            if __name__ in process.cmdline():
                return cls(process, address)
        return None

    @classmethod
    def start(cls) -> Self:
        """Start a holder below this process, and tell the supervisor. Raises RuntimeError with what Ray said."""
        command = [sys.executable, "-m", __name__, str(os.getppid())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        with process.stdout as told:
            said = json.loads(told.readline() or '{"error": "its process ended"}')
        if "error" in said:
            process.wait(CLOSE_S)
            raise RuntimeError(said["error"])
        print(json.dumps({"schema": HELD_CLUSTER_SCHEMA, "pid": process.pid, **said}), flush=True)
        return cls(psutil.Process(process.pid), said["address"])

    def close(self) -> None:
        """End the holder and the cluster."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.terminate()
            try:
                self.process.wait(CLOSE_S)
            except psutil.TimeoutExpired:
                self.process.kill()


def main() -> None:
    """Hold a cluster for the process that started this one and, after its death, for its supervisor."""
    parents = {os.getppid(), int(sys.argv[1])}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        end = start_cluster()
    except Exception as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    try:
        print(json.dumps({"address": ray.get_runtime_context().gcs_address}), flush=True)
        while os.getppid() in parents:
            time.sleep(LOOK_S)
    finally:
        end()


if __name__ == "__main__":
    main()
