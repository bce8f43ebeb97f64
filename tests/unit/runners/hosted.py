# SPDX-License-Identifier: Apache-2.0
"""What the tests of local workers host: a class whose methods show what a child process may do."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np


class Hosted:
    """Built without arguments in a child."""

    component: Any = None
    build: Any = None
    reading = 0

    def start(self, settings: Any) -> dict[str, Any]:
        self.settings = settings
        return {"pid": os.getpid(), "settings": settings}

    async def endless(self) -> AsyncIterator[int]:
        """Count, and how many do so, until nobody reads."""
        self.reading += 1
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            self.reading -= 1

    def readers(self) -> int:
        return self.reading

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def double(self, array: np.ndarray) -> np.ndarray:
        return array * 2

    def variable(self, name: str) -> str:
        return os.environ.get(name, "")

    def temporary_folder(self) -> str:
        return tempfile.gettempdir()

    def parent(self) -> int:
        return os.getppid()

    def imported_by(self, module: str) -> int:
        """Return the process that imported a module which notes that as `PID`."""
        return int(importlib.import_module(module).PID)

    def random_numbers(self) -> list[float]:
        return [random.random(), float(np.random.random()), *os.urandom(4)]

    def chatter(self) -> str:
        print("loud", flush=True)
        sys.stdout.write("x" * 100_000)
        return "done"

    def write(self, text: str) -> None:
        os.write(1, text.encode(errors="surrogatepass"))

    def grandchild(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def forked(self) -> int:
        """Return the process id of a forked child that is up."""
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_say_and_sleep, args=(there,), daemon=True)
        child.start()
        assert here.poll(30.0)
        return child.pid or 0

    def take_memory(self, megabytes: int) -> int:
        return len(bytearray(megabytes << 20))

    def fail(self) -> None:
        raise LookupError("author's mistake")

    def refuse(self) -> None:
        raise ValueError("got 3; give 4")

    def spin(self) -> None:
        while True:
            time.sleep(0.01)

    async def count(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            await asyncio.sleep(0)
            yield number

    async def count_then_fail(self) -> AsyncIterator[int]:
        yield 0
        raise ValueError("no more")


def _say_and_sleep(channel: Any) -> None:
    channel.send("up")
    time.sleep(600)


class SlowToBuild:
    """Never gets ready."""

    def __init__(self) -> None:
        time.sleep(600)
