# SPDX-License-Identifier: Apache-2.0
"""Tools that an environment finds: once for a run, in a process of their own, and in every prompt and instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.api import Chosen, ConfigError, Environment, PluginError, Tool, tools_digest
from relax_core.config.run_config import EnvironmentChoice
from relax_core.registry.catalogue import Catalogue
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.tools import found_tools, keep_tools, writable_folders
from tests.unit.sampling.toy_policy import Script, play, texts

FINDING = '''
import os
from relax_core.api import ConfigError, Environment, Options, Step, Tool


class FindingOptions(Options):
    """Options."""

    names: tuple[str, ...] = ("look",)
    """Tools that are found."""
    log: str = ""
    """File to which each search is written."""


class Finding(Environment[FindingOptions]):
    """Says which tools it has."""

    @classmethod
    async def find_tools(cls, options):
        with open(options.log, "a") as file:
            file.write(f"{os.getpid()} {os.environ.get('HF_TOKEN')}\\n")
        if "bad" in options.names:
            raise ConfigError("environment.names", "bad", "name another")
        return tuple(Tool(name, {"type": "object", "properties": {"at": {"enum": [1, 2]}}}, "Look.") for name in options.names)

    async def reset(self, task, seed):
        return None

    async def step(self, action):
        said = ", ".join(f"{tool.name} {tool.parameters['properties']['at']['enum']}" for tool in self.tools)
        return Step(f"{said}; called {[call.name for call in action.tool_calls]}", not action.tool_calls)


class Here(Finding):
    """The same, in the rollout's own process."""

    in_process = True
'''


async def played(folder: Path, name: str, **options: Any) -> tuple[tuple[Tool, ...], list[str], list[str]]:
    """Find the tools and play a sample: the tools, its text, and the lines of the log."""
    plugin, log = folder / "finding.py", folder / "log"
    plugin.write_text(FINDING)
    chosen = Chosen("environment", name, {"log": str(log), **options})
    choice, build = EnvironmentChoice(chosen=chosen), Catalogue.load([str(plugin)]).build
    run: Any = type("Run", (), {"environment": choice, "environments": ()})
    workers = LocalWorkers([str(plugin)])
    try:
        tools = (await found_tools(run, build, workers))[name]
        pool = EnvironmentPool(choice, ProcessStarter(workers), build=build, tools=tools)
        await pool.start()
        calls = '<tool_call>{"name": "look"}</tool_call>'
        trajectory = await pool.play(lambda environment: play(environment, Script(calls, "done")))
        await pool.stop()
        return tools, texts(trajectory), log.read_text().splitlines()
    finally:
        await workers.close()


@pytest.mark.parametrize("name", ["finding", "here"])
async def test_instances_have_the_tools_that_were_found_once(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    tools, (said,), searches = await played(tmp_path, name, names=("look", "listen"))
    assert [tool.name for tool in tools] == ["look", "listen"]
    assert "look [1, 2], listen [1, 2]; called ['look']" in said
    assert len(searches) == 1 and searches[0].endswith(" None"), "in a process without credentials"


async def test_an_environment_that_cannot_find_its_tools_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment.names: got bad; name another"):
        await played(tmp_path, "finding", names=("bad",))
    with pytest.raises(PluginError, match="two tools of one name"):
        await played(tmp_path, "finding", names=("look", "look"))


class Kept:
    """As much of a bus as keeps."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def keep(self, name: str, value: Any) -> None:
        self.values[name] = value

    async def kept(self, name: str) -> Any:
        return self.values.get(name)


async def test_a_run_that_continues_refuses_other_tools() -> None:
    bus: Any = Kept()
    look = Tool("look", {"at": {"type": "string"}}, "Look.")
    await keep_tools(bus, {})
    assert bus.values == {}, "a run whose tools are all written keeps nothing"
    await keep_tools(bus, {"house": (look,)})
    await keep_tools(bus, {"house": (look,)})
    other = Tool("look", {"at": {"type": "string"}}, "Look closely.")
    with pytest.raises(ConfigError, match=f"environment house: got tools {tools_digest((other,))} .look., but the run"):
        await keep_tools(bus, {"house": (other,)})


def test_a_digest_is_of_what_a_prompt_shows() -> None:
    tool = Tool("look", {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}, "Look.", "here")
    same = Tool("look", {"required": ("a",), "properties": {"b": {}, "a": {}}, "type": "object"}, "Look.", "there")
    assert tools_digest([tool]) == tools_digest([same]), "whatever the order of keys, after a way through a wire"
    for other in (Tool("see", tool.parameters, "Look."), Tool("look", {}, "Look."), Tool("look", tool.parameters, "")):
        assert tools_digest([other]) != tools_digest([tool])
    assert tools_digest([tool, other]) != tools_digest([other, tool])


def test_an_environment_changes_listed_folders_or_with_programs_of_the_user_every_file() -> None:
    environment, choice = Environment(), EnvironmentChoice(chosen=Chosen("environment", "x"), writable=(Path("/a"),))
    assert writable_folders(choice, environment) == ("/a",)
    environment.writes_anywhere = True
    assert writable_folders(choice, environment) == ("/a", "/")
