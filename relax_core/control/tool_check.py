# SPDX-License-Identifier: Apache-2.0
"""A check before a run starts: if environments have tools, the model family must render calls and their answers.

The policy must have a format for calls, and the chat template must accept the answer of a tool. Tools that are known
only during a sample, such as those of an agent's requests, are not checked here.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from relax_core.api.algorithm import Source
from relax_core.api.environment import Environment, Tool
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Plan
from relax_core.api.task import Message, ToolCall
from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.error_text import authored
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.tools import found_tools

PROBE = Tool("probe")
CALLED = (Message("user", "x"), Message("assistant", "", (ToolCall("probe", {}),)))
ANSWERS = (Message("tool", "1", name="probe"), Message("tool", "2", name="probe"))


def tools_before_start(config: RunConfig, catalogue: Catalogue) -> dict[str, tuple[Tool, ...]]:
    """Find the tools of a run's environments before the run starts; empty if no environment class finds tools.

    Raises ConfigError if tools can't be found.
    """
    if not any(environment.finds_tools() for environment in _environments(config, catalogue)):
        return {}

    async def find() -> dict[str, tuple[Tool, ...]]:
        workers = LocalWorkers([str(path) for path in config.plugins])
        try:
            return await found_tools(config, catalogue.build, workers)
        finally:
            await workers.close()

    return asyncio.run(find())


def check_tool_calls(config: RunConfig, catalogue: Catalogue, plan: Plan) -> None:
    """Raise ConfigError if environments have tools, but the family has no format for calls or refuses their answers.

    The model folder is opened only if there may be tools, and `find_tools` is called only if something is missing.
    """
    environments = _environments(config, catalogue)
    may_have = any(environment.tools or environment.finds_tools() for environment in environments)
    if plan.source is not Source.ROLLOUT or not may_have:
        return
    family: Any = catalogue.build(config.family.chosen)
    family.open(config.model.model_dump(mode="json"))
    try:
        with authored(f"model-family {config.family.chosen.name}"):
            family.start("", (PROBE,))
            one, other = (family.delta(CALLED, (answer,)) for answer in ANSWERS)
            if one == other and family.encode("1") != family.encode("2"):
                got = "a template that leaves out messages of the role tool, so the policy would not see tools' answers"
                raise ConfigError("model.chat_template", got, "name a template that shows them")
    except ConfigError:
        written = any(environment.tools for environment in environments)
        if written or any(tools_before_start(config, catalogue).values()):
            raise


def _environments(config: RunConfig, catalogue: Catalogue) -> list[type[Environment]]:
    names = [one.name for one in (config.environment, *config.environments)]
    return [cast(type[Environment], catalogue.target("environment", name)) for name in names]
