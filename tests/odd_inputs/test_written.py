# SPDX-License-Identifier: Apache-2.0
"""What the policy writes never ends a run: a broken call or odd text costs at most its own sample."""

from __future__ import annotations

import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_plugin_chat.chat import ChatFamily

from relax_contrib.recipes.quickstart.model import save_tokenizer
from relax_core.api import Action, Chosen, Environment, Message, Outcome, Source, Step, Task, Tool
from relax_core.api.errors import ConfigError
from relax_core.control.tool_check import check_tool_calls
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.episode import InProcess, Limits, run_episode
from tests.unit.sampling.toy_policy import Completion, Letters, Script, answering

TABLE = tomllib.loads((Path(__file__).parent / "written.toml").read_text())
TASK = Task("t", (Message("user", "go"),))
ANSWERED = {Outcome.FINISHED, Outcome.TRUNCATED, Outcome.ENVIRONMENT_ERROR}


class Searcher(Environment):
    """Has a tool, and reads its only argument as an author would."""

    in_process = True
    tools = (Tool("search", {"query": str}),)

    async def reset(self, task: Task, seed: int) -> None: ...

    async def step(self, action: Action) -> Step:
        found = "".join(call.arguments["query"] for call in action.tool_calls)
        return Step(found, not action.tool_calls)


@pytest.mark.parametrize("form", TABLE["formats"])
async def test_odd_text_costs_at_most_its_sample(form: str) -> None:
    for text in TABLE["texts"]:
        family = Letters()
        family.tool_calls = form
        prompt = family.start(TASK.prompt, Searcher.tools)
        environment = InProcess(Searcher(), 30.0)
        trajectory = await run_episode(
            TASK, prompt, 1, environment, family, answering(Script(text, text, "end")), Limits(200, 3)
        )
        assert trajectory.outcome in ANSWERED, text


@pytest.mark.parametrize("entry", TABLE["template"], ids=lambda entry: entry["what"].replace(" ", "-"))
async def test_a_template_that_refuses_a_tool_s_answer_is_found_at_the_start_or_costs_one_sample(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    family = ChatFamily()
    model = {"path": str(tmp_path), "chat_template": entry["text"], "tool_calls": "hermes"}
    choice = SimpleNamespace(name="searcher")
    config: Any = SimpleNamespace(
        environment=choice, environments=(), family=SimpleNamespace(chosen=Chosen("model-family", "chat")),
        model=SimpleNamespace(model_dump=lambda mode: model),
    )  # fmt: skip
    catalogue: Any = SimpleNamespace(target=lambda kind, name: Searcher, build=lambda chosen: family)
    refused = pytest.raises(ConfigError) if entry["at_start"] else nullcontext()
    with refused as caught:
        check_tool_calls(config, catalogue, SimpleNamespace(source=Source.ROLLOUT))  # type: ignore[arg-type]
    if entry["at_start"]:
        assert entry["at_start"] in str(caught.value) and caught.value.exit_code == 2
    family.open(model)
    broken = (*family.encode("12"), family.stop_tokens[0])

    async def policy(call: PendingRequest) -> Completion:
        return Completion(broken, (-0.1,) * len(broken), (1,) * len(broken))

    monkey = family.parse
    family.parse = lambda tokens, tools=(), before=(): (monkey(tokens)[0], (), "no call")  # type: ignore[method-assign]
    trajectory = await run_episode(
        TASK, family.start(TASK.prompt), 1, InProcess(Searcher(), 30.0), family, answering(policy), Limits(8, 3)
    )
    if entry["later"]:
        assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and entry["later"] in trajectory.info["error"]
    else:
        assert trajectory.outcome is Outcome.TRUNCATED
