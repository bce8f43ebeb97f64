# SPDX-License-Identifier: Apache-2.0
"""Runs a suite's exercise in a fresh interpreter under a deadline, so that a component that blocks or crashes is a result.

Suites travel by cloudpickle over the child's own pipe; classes of modules that the child could not import go by value.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from relax_core.registry.handshake import find_module

if TYPE_CHECKING:
    from relax_core.testing.suite import Suite

START_S = 180.0
"""For imports, before the exercise's own deadline begins: heavy libraries load slowly on a busy machine."""
READY = b"\x00ready\n"


@dataclass(frozen=True, slots=True)
class Apart:
    """How it ended: a value, or an error."""

    value: Any = None
    error: str = ""
    raised: bool = False
    """The component raised: its samples may not suit it."""
    blocked: bool = False


def run_apart(suite: type[Suite], hash_seed: int, deadline_s: float) -> Apart:
    """`suite.exercise` on a new instance, in another process with this hash seed."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path}
    child = subprocess.Popen(
        [sys.executable, "-m", "relax_core.testing.child"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, start_new_session=True,
    )  # fmt: skip
    try:
        return _converse(child, _packed(suite), deadline_s)
    finally:
        _end(child)


def _converse(child: subprocess.Popen[bytes], payload: bytes, deadline_s: float) -> Apart:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(payload)
    child.stdin.close()
    child.stdin = None
    started = _read_until_ready(child.stdout.fileno(), time.monotonic() + START_S)
    if started is None:
        return Apart(error=f"its import did not end within {START_S:g} s", blocked=True)
    try:
        answer, noise = child.communicate(timeout=deadline_s if started else None)
    except subprocess.TimeoutExpired:
        return Apart(blocked=True)
    if not answer:
        last = noise.decode(errors="replace").strip()[-1500:]
        return Apart(error=f"its process ended with exit code {child.returncode}\n{last}")
    value, error, raised = pickle.loads(answer)
    return Apart(value, error, raised)


def _read_until_ready(pipe: int, deadline: float) -> bool | None:
    """True once imported, False where the child ended first, None where it takes too long."""
    got = b""
    while got != READY:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        piece = os.read(pipe, len(READY) - len(got))
        if not piece:
            return False
        got += piece
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it started."""
    with suppress(ProcessLookupError):  # it has ended already, and left nothing
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _packed(suite: type[Suite]) -> bytes:
    owners = {suite.__module__}
    if isinstance(suite.component, type):
        owners |= {cls.__module__ for cls in suite.component.__mro__}
    with _by_value([module for name in owners if (module := sys.modules.get(name))]):
        return bytes(cloudpickle.dumps(suite))


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Pickle what these modules define by value where a fresh interpreter would not find them."""
    strangers = [module for module in modules if not _importable(module)]
    for module in strangers:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in strangers:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    spec = None if module.__name__ == "__main__" else find_module(module.__name__)
    return spec is not None and spec.origin == getattr(module, "__file__", spec.origin)
