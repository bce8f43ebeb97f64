# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster of a run: joined where one is named, else of the run's own; and Serve on it."""

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
"""Ray's default is a third of the machine's memory."""
LOGICAL_CPUS = 64
"""Bookkeeping only: roles and workers ask for none, Serve's own actors for some."""
START_TRIES, NODE_TIMED_OUT = 2, "timed out during startup"
"""A raylet ends when its own agent takes 15 s to start, as it may on a busy machine."""
INIT: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
SERVE_ACTOR = "SERVE_CONTROLLER_ACTOR"
SERVE_TRIES, SERVE_PAUSE_S = 40, 0.5
"""While another run starts Serve on the same cluster."""


class Cluster:
    """The Ray cluster of a run: joined where one is named, else started for this run alone and ended with it.

    Its calls run in one thread that lives until `close`: the daemons end with the thread that started them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ray")
        self._connecting: Future[None] | None = None
        self._end: Callable[[], None] | None = None
        self.ours = False
        """Started by us: nobody else is on it, and it ends with us."""

    def begin(self) -> Future[None]:
        """Start connecting; `connect` waits for the end of it."""
        if self._connecting is None:
            self._connecting = self._thread.submit(self._connect)
        return self._connecting

    async def connect(self) -> None:
        """Join `RAY_ADDRESS`, else start a local cluster. Raises InfrastructureError with Ray's reason."""
        await asyncio.wrap_future(self.begin())

    async def close(self) -> None:
        """End a cluster of our own; leave another as it was."""
        await asyncio.wrap_future(self._thread.submit(self._disconnect))
        self._thread.shutdown(wait=False)

    # -- in the thread ------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
        for name in ("ray", "ray.serve"):  # its messages are in its own logs, and what concerns the run, roles say
            logging.getLogger(name).setLevel(logging.ERROR)
        ray._private.worker._worker_logs_enabled = False  # the switch of Ray's own debugger: raylet messages on stdout
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


def _start_serve() -> None:
    """Join Serve, else start it. Who starts it at the same moment on the same cluster wins; then we join theirs."""
    for left in reversed(range(SERVE_TRIES)):
        try:
            serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False, "log_level": "ERROR"})
            return
        except Exception as error:  # which type and words it is depends on how far the other one has come
            if SERVE_ACTOR not in str(error) or not left:
                raise
            time.sleep(SERVE_PAUSE_S)
