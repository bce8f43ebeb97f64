# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster of a run: joined where one is named, else of the run's own; and Serve on it."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import ray
import ray._private.worker
from ray import serve

from relax_core.api.errors import InfrastructureError
from relax_core.runners.ray.environment import joins
from relax_core.runners.ray.own_cluster import INIT, ClusterHolder, start_cluster

SERVE_ACTOR = "SERVE_CONTROLLER_ACTOR"
SERVE_TRIES, SERVE_PAUSE_S = 40, 0.5
"""While another run starts Serve on the same cluster."""


class Cluster:
    """The Ray cluster of a run: joined where one is named, else started for this run alone and ended with it.

    Its calls run in one thread that lives until `close`: the daemons end with the thread that started them.
    """

    def __init__(self, held: bool = False) -> None:
        """`held`: one of our own outlives this process, for its successor."""
        self._thread = ThreadPoolExecutor(1, "ray")
        self._connecting: Future[None] | None = None
        self._held = held
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
        if not self.ours:
            self._end = ray.shutdown
            ray.init(**INIT)
        elif self._held:
            holder = ClusterHolder.find() or ClusterHolder.start()

            def leave() -> None:
                ray.shutdown()
                holder.close()

            self._end = leave
            ray.init(**INIT, address=holder.address)
        else:
            self._end = start_cluster()

    def _disconnect(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


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
