# SPDX-License-Identifier: Apache-2.0
"""The worker's side of calls: `Host`, and errors as data.

A host is independent of the transport: `runners.local.child` serves it over a socket, `runners.ray` inside an actor.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import inspect
import os
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from random import SystemRandom
from typing import Any, Protocol

from relax_core.api import errors
from relax_core.api.component import Chosen, Configurable
from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.registry.error_text import plugin_frames
from relax_core.rpc import messages

TRACEBACKS = "RELAX_TRACEBACKS"
"""Environment variable; if it is set, errors of hosted code also print their whole traceback."""
PORTS = range(20_000, 32_768)


class Builder(Protocol):
    """The part of a plugin catalogue that a host needs."""

    def build(self, chosen: Chosen) -> Configurable: ...


@messages.register
@dataclass(frozen=True, slots=True)
class Failure:
    """An error as data, sent back to the caller."""

    type: str
    message: str
    frames: str = ""
    fields: tuple[str, ...] = ()


class Host:
    """A component instance whose public methods can be called from another process.

    Synchronous methods run one at a time in one thread, so that trainers keep their thread-bound state.
    """

    def __init__(self, instance: Any, build: Callable[[Chosen], Any], thread: Executor | None = None) -> None:
        self.instance = instance
        self.instance.build = build
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="work")

    @classmethod
    def make(cls, component: Chosen, target: str, builder: Builder, thread: Executor | None = None) -> Host:
        if not target:
            return cls(builder.build(component), builder.build, thread)
        module, _, name = target.partition(":")
        instance = getattr(importlib.import_module(module), name)()
        instance.component = component
        return cls(instance, builder.build, thread)

    async def call(self, method: str, args: Sequence[Any]) -> Any:
        function = self._method(method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        context = copy_context()  # so that the thread's log records have the fields of the call
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: context.run(self._run, method, args)
        )

    def _run(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method. A component that the method returns takes the place of the instance, and gets the same call."""
        result = self._method(method)(*args)
        while isinstance(result, Configurable):
            self.instance = result
            result = self._method(method)(*args)
        return result

    async def stream(self, method: str, args: Sequence[Any]) -> AsyncIterator[Any]:
        async for item in self._method(method)(*args):
            yield item

    def _method(self, name: str) -> Callable[..., Any]:
        function = None if name.startswith("_") else getattr(self.instance, name, None)
        if not callable(function):
            raise ConfigError("worker method", repr(name), f"{type(self.instance).__name__} has no such public method")
        return function  # type: ignore[no-any-return]


def free_port(address: str) -> int:
    """Find a free port at an address of this machine. Another process may take the port before the caller does.

    Ports that Linux uses for outgoing connections are tried last, since such a connection could take the port first.
    """
    for port in SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((address, port))
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def describe(error: BaseException) -> Failure:
    """Turn any exception into data. Its frames are those of plugin code, or all frames if no plugin code ran."""
    try:
        message, frames, fields = _described(error)
    except Exception as other:  # the author's exception has a faulty __str__
        message, frames, fields = f"without a message, since its __str__ raised {other!r}", "", ()
    plain = [text.encode("utf-8", "backslashreplace").decode() for text in (message, frames, *fields)]
    return Failure(type(error).__name__, plain[0], plain[1], tuple(plain[2:]))


def _described(error: BaseException) -> tuple[str, str, tuple[str, ...]]:
    if os.environ.get(TRACEBACKS) and not isinstance(error, RelaxError):
        traceback.print_exception(error)
    frames = plugin_frames(error) or "".join(traceback.format_exception(error)[1:])
    fields: tuple[str, ...] = ()
    if isinstance(error, ConfigError):
        fields = (error.field, str(error.got), error.fix)
    if isinstance(error, PluginError):
        frames = error.frames or frames
    return str(error), frames, fields


def raised(failure: Failure, worker: str) -> Exception:
    """Return the exception to raise in the caller: Relax and some built-in errors keep their type, else PluginError."""
    if failure.type == "ConfigError":
        if len(failure.fields) == 3:
            return ConfigError(*failure.fields)
        return PluginError(worker, f"{failure.type}: {failure.message}", failure.frames)
    if failure.type == "PluginError":
        component, _, message = failure.message.partition(": ")
        return PluginError(component, message, failure.frames)
    ours: Mapping[str, Any] = vars(errors)
    known = ours.get(failure.type) or getattr(builtins, failure.type, None)
    if isinstance(known, type) and issubclass(known, (RelaxError, ValueError, NotImplementedError, KeyError)):
        error: Exception = known.__new__(known)
        error.args = (failure.message,)
        return error
    return PluginError(worker, f"{failure.type}: {failure.message}", failure.frames)
