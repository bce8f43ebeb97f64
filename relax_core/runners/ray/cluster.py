# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster of a run, with Serve on it: the cluster that RAY_ADDRESS names, else one of the run's own."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import ray._private.worker
from ray import serve

from relax_core.api.errors import InfrastructureError
from relax_core.runners.ray.connection import NAMESPACE
from relax_core.runners.ray.environment import joins
from relax_core.runners.ray.reaper import Reaper

OBJECT_STORE_BYTES = 512 << 20
"""Size of Ray's object store. Ray's default is a third of the machine's memory."""
LOGICAL_CPUS = 64
"""CPUs that Ray may schedule. Roles and workers request none, but Serve's own actors request some."""
START_TRIES, NODE_TIMED_OUT = 2, "timed out during startup"
"""Attempts to start a cluster, and the text of the error to retry: a raylet ends if its agent takes 15 s to start."""
INIT: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
DRAINING_S = 10.0
"""Seconds in which the cluster must say which nodes it drains."""
SERVE_ACTOR = "SERVE_CONTROLLER_ACTOR"
SERVE_TRIES, SERVE_PAUSE_S = 40, 0.5
"""Attempts to join Serve, and seconds between them, while another run starts Serve on the same cluster."""


class Cluster:
    """The Ray cluster of a run: joined if RAY_ADDRESS names one or ray is initialized, else started for this run only.

    All Ray calls run in one thread that lives until `close`, because Ray's daemons end with the thread that started
    them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ray")
        self._connecting: Future[None] | None = None
        self._end: Callable[[], None] | None = None
        self.ours = False
        """True if this run started the cluster. The cluster then has no further users and ends with the run."""

    def begin(self) -> Future[None]:
        """Start connecting in the thread; `connect` waits for the result."""
        if self._connecting is None:
            self._connecting = self._thread.submit(self._connect)
        return self._connecting

    async def connect(self) -> None:
        """Join `RAY_ADDRESS`, else start a local cluster. Raises InfrastructureError with Ray's reason."""
        await asyncio.wrap_future(self.begin())

    async def close(self) -> None:
        """End the run's own cluster, or disconnect from a joined one."""
        await asyncio.wrap_future(self._thread.submit(self._disconnect))
        self._thread.shutdown(wait=False)

    # -- in the thread ------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
        for name in ("ray", "ray.serve"):  # Ray has its own log files, and roles report what concerns the run
            logging.getLogger(name).setLevel(logging.ERROR)
        ray._private.worker._worker_logs_enabled = False  # keep raylet messages off stdout; a private switch of Ray
        self.ours = not joins() and not ray.is_initialized()
        try:
            if not ray.is_initialized():
                self._start_or_join()
            _start_serve()
        except Exception as error:
            self._disconnect()
            raise InfrastructureError(f"ray: could not start or join a cluster: {error}; try --runner local") from error

    def _start_or_join(self) -> None:
        if self.ours:
            self._end = start_cluster()
        else:
            self._end = ray.shutdown
            ray.init(**INIT)

    def _disconnect(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


def draining_hosts() -> frozenset[str]:
    """Return the addresses of the nodes that Ray drains: a cloud has announced their end, or an operator."""
    ids = ray._private.worker.global_worker.gcs_client.get_draining_nodes(timeout=DRAINING_S)
    return frozenset(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] in ids)


def start_cluster() -> Callable[[], None]:
    """Start a cluster that ends with this process, even if the process is killed; return the function that ends it."""
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


def _start_serve() -> None:
    """Join Serve or start it. While another run is starting Serve on the same cluster, try again."""
    for left in reversed(range(SERVE_TRIES)):
        try:
            serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False, "log_level": "ERROR"})
            return
        except Exception as error:  # its type and text depend on how far the concurrent start has come
            if SERVE_ACTOR not in str(error) or not left:
                raise
            time.sleep(SERVE_PAUSE_S)
