# SPDX-License-Identifier: Apache-2.0
"""Discovery of tools for environment classes that implement `find_tools`, for example tools offered by servers.

Tools are part of every prompt, so they are found once, before the first prompt is rendered. A resumed run must find the
same tools again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from relax_core.api.bus import Bus
from relax_core.api.component import Chosen
from relax_core.api.environment import Environment, Tool, tools_digest
from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.role import Workers, WorkerSpec
from relax_core.observe.console import waiting_for
from relax_core.registry.shapes import WrongShape, checked, returned_by
from relax_core.rpc.isolated_host import IsolatedHost
from relax_core.rpc.isolated_pool import INHERITED_ENV, START_S, charged

if TYPE_CHECKING:  # importing the configuration would slow down the start of a tool finder's process
    from relax_core.config.run_config import EnvironmentChoice, RunConfig

KEPT = "tools"
"""Key under which the bus stores the digests of a run's tools."""


async def found_tools(run: RunConfig, build: Callable[[Chosen], Any], workers: Workers) -> dict[str, tuple[Tool, ...]]:
    """Return the tools of each environment whose class implements `find_tools`, by the environment's name."""
    found: dict[str, tuple[Tool, ...]] = {}
    for choice in (run.environment, *run.environments):
        environment: Environment = build(choice.chosen)
        if environment.finds_tools():
            found[choice.known_as] = await _found(choice, environment, workers)
    return found


def writable_folders(choice: EnvironmentChoice, environment: Environment) -> tuple[str, ...]:
    """Return the folders that the processes of an environment may change, in addition to temporary folders."""
    return (*map(str, choice.writable), *(("/",) if environment.writes_anywhere else ()))


async def _found(choice: EnvironmentChoice, environment: Environment, workers: Workers) -> tuple[Tool, ...]:
    spec = WorkerSpec(
        f"tools-{choice.known_as}", choice.chosen, target="relax_core.sampling.tools:ToolFinder",
        memory_mb=choice.memory_mb, inherit_env=(*INHERITED_ENV, *choice.inherit_env), untrusted=True,
        writable=writable_folders(choice, environment),
    )  # fmt: skip
    with waiting_for(f"starting the process of {spec.name}"):
        (worker,) = await workers.start([spec], START_S)
    try:
        started = await worker.call("start", timeout_s=START_S)
        *_, tools = checked(started, tuple[bool, bool, Any], "start")
    except (WrongShape, ValueError, LookupError, NotImplementedError) as error:
        raise charged(error, f"environment {choice.known_as}") from error
    finally:
        await worker.kill()
    check_tools(choice.known_as, tools)
    if len({tool.name for tool in tools}) < len(tools):
        raise PluginError(
            f"environment {choice.known_as}", "find_tools returned two tools of one name; give each tool its own name"
        )
    return tuple(tools)


def check_tools(environment: str, tools: Any) -> None:
    """Raise PluginError naming the environment unless `tools` is a sequence of tools."""
    try:
        checked(tools, tuple[Tool, ...], "tools")
    except WrongShape as error:
        raise PluginError(f"environment {environment}", f"{error}; set `tools` to a tuple of api.Tool") from error


class ToolFinder(IsolatedHost):
    """A process that runs an environment class's `find_tools` once and then ends."""

    async def open(self) -> tuple[Tool, ...]:
        environment: Environment = self.build(self.component)
        found = type(environment).find_tools
        return tuple(checked(await found(environment.options), tuple[Tool, ...], returned_by(found)))


async def keep_tools(bus: Bus, found: Mapping[str, tuple[Tool, ...]]) -> None:
    """Store the digests of the run's tools. Raises ConfigError if a resumed run found tools that differ."""
    if not found:
        return
    known, digests = await bus.kept(KEPT) or {}, {name: tools_digest(tools) for name, tools in found.items()}
    for name, digest in digests.items():
        if known.get(name, digest) != digest:
            got = (
                f"tools {digest} ({', '.join(tool.name for tool in found[name])}), but the run began with {known[name]}"
            )
            raise ConfigError(f"environment {name}", got, "provide the former tools again, or start a new run")
    if digests != known:
        await bus.keep(KEPT, digests)
