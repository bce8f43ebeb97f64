# SPDX-License-Identifier: Apache-2.0
"""Host of a worker process: one component instance whose public methods others call.

It knows nothing of how calls arrive: `runners.local.child` serves it over a socket, `runners.ray` inside an actor.
Synchronous methods run one at a time in one thread, so that trainers keep their thread-bound state.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from relax_core.api.component import Chosen, Configurable
from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.registry.frames import plugin_frames
from relax_core.rpc import messages

TRACEBACKS = "RELAX_TRACEBACKS"
"""Where this environment variable is set, errors of hosted code print their whole traceback as well."""


class Builder(Protocol):
    """The part of the catalogue that a host needs."""

    def build(self, chosen: Chosen) -> Configurable: ...


@messages.register
@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way back to the caller."""

    type: str
    message: str
    frames: str = ""
    fields: tuple[str, ...] = ()


class Host:
    """One instance and its methods."""

    def __init__(self, instance: Any, build: Callable[[Chosen], Any], thread: Executor | None = None) -> None:
        self._instance = instance
        self._instance.build = build
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="work")

    @classmethod
    def make(cls, component: Chosen, target: str, builder: Builder, thread: Executor | None = None) -> Host:
        if not target:
            return cls(builder.build(component), builder.build, thread)
        instance = _load(target)()
        instance.component = component
        return cls(instance, builder.build, thread)

    async def call(self, method: str, args: Sequence[Any]) -> Any:
        function = self._method(method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args))

    async def stream(self, method: str, args: Sequence[Any]) -> AsyncIterator[Any]:
        async for item in self._method(method)(*args):
            yield item

    def _method(self, name: str) -> Callable[..., Any]:
        function = None if name.startswith("_") else getattr(self._instance, name, None)
        if not callable(function):
            raise ConfigError("worker method", repr(name), f"{type(self._instance).__name__} has no such public method")
        return function  # type: ignore[no-any-return]


def free_port(address: str) -> int:
    """Find a free port of this machine at one of its addresses; another process may be quicker to take it."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def describe(error: BaseException) -> Failure:
    """An exception as data; frames are the plugin's own, or all where none of it ran."""
    if os.environ.get(TRACEBACKS) and not isinstance(error, RelaxError):
        traceback.print_exception(error)
    frames = plugin_frames(error) or "".join(traceback.format_exception(error)[1:])
    fields: tuple[str, ...] = ()
    if isinstance(error, ConfigError):
        fields = (error.field, str(error.got), error.fix)
    if isinstance(error, PluginError):
        frames = error.frames or frames
    return Failure(type(error).__name__, str(error), frames, fields)


def raised(failure: Failure, worker: str) -> Exception:
    """The exception that a caller should see: ours and built-in ones by their type, others as PluginError."""
    import builtins

    from relax_core.api import errors

    if failure.type == "ConfigError" and len(failure.fields) == 3:
        return ConfigError(*failure.fields)
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


def _load(target: str) -> Any:
    import importlib

    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
