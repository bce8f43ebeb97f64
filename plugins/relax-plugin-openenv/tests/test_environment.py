# SPDX-License-Identifier: Apache-2.0
"""An episode on a server is played as the policy acts, and whatever is the server's fault is no one's answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError
from relax_plugin_openenv.connection import EpisodeConnection, ServerFailed
from relax_plugin_openenv.environment import OpenEnv, OpenEnvOptions

from relax_core.api import Action, ConfigError, Outcome, Step, Task
from relax_core.sampling.episode import Limits
from tests.unit.sampling.environment_pool import environment_pool
from tests.unit.sampling.toy_policy import Script, play

TASK = Task("one", "Go.")


@asynccontextmanager
async def playing(server: Any, task: Task = TASK, **more: Any) -> AsyncIterator[Callable[..., Any]]:
    """A function that takes a turn, with messages as JSON."""
    options = OpenEnvOptions(**{"url": server.url, **more})
    environment = OpenEnv(options)
    environment.shared = await OpenEnv.open(options)
    try:
        first = await environment.reset(task, 7)

        async def say(message: str, text: str = "") -> Step:
            return await environment.step(Action(text or json.dumps({"message": message}), ()))

        say.first = first  # type: ignore[attr-defined]
        yield say
    finally:
        await environment.close()


async def test_an_episode_is_reset_stepped_credited_and_closed(server: Any) -> None:
    task = Task("one", "Go.", metadata={"openenv": {"reset": {"word": "w", "episode_id": "x"}}})
    async with playing(
        server, task, reset={"word": "v"}, note_state=True, show="echoed", template="{shown} {reward}"
    ) as say:
        assert say.first.content.startswith("seed 7 word w\n\nEnd your answer with a JSON object")
        assert '"required": ["message"]' in say.first.content and "metadata" not in say.first.content
        steps = [await say(message) for message in ("a", "bb", "ccc")]
    assert [(step.observation.content, step.reward, step.done) for step in steps] == [
        ("a 0.1", 0.1, False), ("bb 0.2", 0.2, False), ("ccc 0.3", 0.3, True),
    ]  # fmt: skip
    assert steps[-1].info["openenv"] == {"turns": 3, "invalid": 0, "state": {"episode_id": "x", "step_count": 3}}
    assert server.heard[0] == {"type": "reset", "data": {"word": "w", "episode_id": "x", "seed": 7}}
    assert server.heard[-1] == {"type": "close"}


async def test_an_invalid_action_is_reported_to_the_policy_and_costs_a_turn(server: Any) -> None:
    async with playing(server, invalid_reward=-0.5) as say:
        told = [await say("", '{"nope": 1}'), await say("", "no action"), await say("", "[1]")]
        assert (await say("a")).reward == 0.1
    words = [step.observation.content for step in told]
    assert "message: Field required; nope: Extra inputs are not permitted" in words[0]
    assert "no JSON object" in words[1] and "not a JSON object" in words[2]
    assert [(step.reward, step.done) for step in told] == [(-0.5, False)] * 3
    assert told[-1].info["openenv"] == {"turns": 3, "invalid": 3}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("vanish", "closed the connection instead of answering a step"),
        ("silence", "did not answer a step within 0.5 s"),
        ("nonsense", "not with type observation"),
        ("nan", "finite number"),
        ("boom", 'EXECUTION_ERROR: boom inside; .* raised = "say"'),
    ],
)
async def test_a_fault_of_the_server_is_not_an_answer(server: Any, message: str, why: str) -> None:
    async with playing(server, step_s=0.5) as say:
        with pytest.raises(ServerFailed, match=why):
            await say(message)


async def test_a_late_answer_is_not_taken_for_that_of_the_next_step(server: Any) -> None:
    async with playing(server, step_s=0.3) as say:
        with pytest.raises(ServerFailed, match="within 0.3 s"):
            await say("silence")
        with pytest.raises(ServerFailed, match="gone"):
            await say("a")


async def test_an_environments_error_can_be_shown_to_the_policy(server: Any) -> None:
    async with playing(server, raised="say", invalid_reward=-1.0) as say:
        step = await say("boom")
        assert (step.observation.content, step.reward) == ("No action was taken: boom inside.", -1.0)
        assert (await say("a")).reward == 0.1


async def test_an_episode_without_a_reward_does_not_score_zero(server: Any) -> None:
    async with playing(server) as say:
        assert [(await say("nothing")).reward for _ in range(2)] == [None, None]
        with pytest.raises(ServerFailed, match='without a reward; set reward = "rewards"'):
            await say("nothing")
    async with playing(server, reward="rewards") as say:
        assert [(await say("abc")).reward for _ in range(3)] == [None] * 3


async def test_a_full_server_is_waited_for_until_the_deadline(server: Any) -> None:
    server.sessions = 1
    holding = EpisodeConnection(server.url, {}, 1 << 20)
    await holding.begin({}, 10.0)
    with pytest.raises(ServerFailed, match="no session left: Server at capacity: 1/1 .* within 0.5 s"):
        async with playing(server, begin_s=0.5):
            pass
    asyncio.get_running_loop().call_later(0.5, lambda: asyncio.ensure_future(holding.close()))
    async with playing(server, begin_s=20.0) as say:
        assert (await say("a")).reward == 0.1
    assert server.heard.count({"type": "close"}) == 2


async def test_a_task_names_only_servers_on_allowed_hosts(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials go to none of them."""
    monkeypatch.setenv("OPENENV_KEY", "hush")
    headers = {"authorization": "env:OPENENV_KEY"}
    task = Task("other", "Go.", metadata={"openenv": {"url": server.url}})
    with pytest.raises(ConfigError, match=r'allowed_hosts = \["127.0.0.1"\]'):
        async with playing(server, task, headers=headers):
            pass
    async with playing(server, task, headers=headers, allowed_hosts=("127.0.0.*",)) as say:
        await say("a")
    assert [one.get("authorization") for one in server.headers] == ["hush", "hush", None]
    async with playing(server, headers=headers):
        assert server.headers[-1]["authorization"] == "hush"


async def test_a_redirect_is_not_followed(server: Any) -> None:
    with pytest.raises(ServerFailed, match=f"redirects to {server.url}/ws"):
        async with playing(server, url=f"{server.url}/moved"):
            pass


async def test_a_missing_server_stops_the_run_at_its_start() -> None:
    with pytest.raises(ConfigError, match=r"environment\.url: .*no connection.*start the server"):
        await OpenEnv.open(OpenEnvOptions(url="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"act": "text"}, "needs {text} in action"),
        ({"action": {"a": "{text}"}}, "no effect without act"),
        ({"opening": "{board}"}, "no placeholder {board}"),
        ({"headers": {"authorization": "hush"}}, "never the value"),
        ({"url": "ftp://host"}, "pattern"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        OpenEnvOptions(**{"url": "http://host", **options})


async def test_a_dead_server_is_the_outcome_of_its_sample(server: Any) -> None:
    options = {"url": server.url, "act": "text", "action": {"message": "{text}"}, "show": "echoed"}
    async with environment_pool("openenv", options) as pool:
        well, ill = [
            await pool.play(lambda environment, said=said: play(environment, Script(*said), TASK, Limits(200, 8)))
            for said in (("a", "bb", "ccc"), ("a", "vanish"))
        ]
    assert (well.outcome, well.environment_reward) == (Outcome.FINISHED, pytest.approx(0.6))
    assert ill.outcome is Outcome.ENVIRONMENT_ERROR and "closed the connection" in str(ill.info)
