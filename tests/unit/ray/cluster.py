# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of the tests' own, started by `ray start` in a folder of its own and ended with its process group."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

START_S = 300.0


class ForeignCluster:
    """Use as a context manager; `address` is what `RAY_ADDRESS` takes."""

    address = ""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))  # sockets have short paths
        arguments = [
            "start", "--head", "--block", "--port=0", "--num-cpus=32", "--num-gpus=4", "--object-store-memory=200000000",
            "--include-dashboard=false", "--include-log-monitor=false", "--disable-usage-stats",
            f"--temp-dir={self.folder}", "--labels=market=spot",
        ]  # fmt: skip
        self._log = (self.folder / "start.log").open("w")
        own = self.environment()  # before this process's variables are read, to which its first call adds
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *arguments], cwd=self.folder, stdin=subprocess.DEVNULL,
            env={**os.environ, **own}, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self.address = self._found()
        return self

    def __init__(self, guarded: bool = True) -> None:
        """`guarded`: it asks for a token of its own, which only processes that import ray after it has started can show; else
        for the one that this process has, which may have imported ray long ago."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self._auth = token if guarded else {}

    def environment(self) -> dict[str, str]:
        """For its own processes and for whoever joins it."""
        from relax_core.runners.ray.environment import SETTINGS

        return {
            **SETTINGS,
            **self._auth,
            "OMP_NUM_THREADS": "1",
            **({"RAY_ADDRESS": self.address} if self.address else {}),
        }

    def _found(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError):
                if address := (self.folder / "ray_current_cluster").read_text().strip():
                    return address
            time.sleep(0.1)
        self._end()
        raise AssertionError(f"no cluster: {(self.folder / 'start.log').read_text()}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        """Its processes and theirs, by their ids."""
        tree = []
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        psutil.wait_procs(tree, 10)
        self._log.close()
