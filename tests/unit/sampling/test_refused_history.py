# SPDX-License-Identifier: Apache-2.0
"""A history that the chat template refuses, or that is no whole text, costs no other sample anything."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from relax_plugin_chat.chat import ChatFamily

from relax_contrib.recipes.quickstart.model import save_tokenizer
from relax_core.api import Environment, Message, Outcome, Part, PromptRefused, Task, Trajectory
from relax_core.api.task import Media
from relax_core.engines.requests import PendingRequest
from relax_core.media.placeholders import MediaRefused, MediaUnavailable
from relax_core.sampling.episode import InProcess, Limits, run_episode
from tests.unit.sampling.toy_policy import Completion, answering

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}{{ m.content }}<eos>"
    "{% endfor %}"
)


class Agent(Environment):
    """Asks with a history of its own."""

    in_process = True
    history: tuple[Message, ...]

    async def run(self, task: Task, seed: int, session: Any) -> None:
        session = session.restart(self.history)
        await session.generate()
        session.observe("more\ud83d")
        await session.generate()


@pytest.fixture(scope="module")
def family(chat_family: Any) -> ChatFamily:
    opened: ChatFamily = chat_family(save_tokenizer, chat_template=TEMPLATE)
    return opened


async def played(family: ChatFamily, *history: Message, agent: type[Agent] = Agent, media: Any = None) -> Trajectory:
    tokens = (*family.encode("ok"), family.stop_tokens[0])

    async def policy(call: PendingRequest) -> Completion:
        await asyncio.sleep(0)
        return Completion(tokens, (-0.1,) * len(tokens), (1,) * len(tokens), (1,) * len(tokens), "stop")

    playing, task = agent(), Task("t", (Message("user", "go"),))
    playing.history = history
    prompt, limits = family.start(task.prompt), Limits(8, 4)
    return await run_episode(task, prompt, 7, InProcess(playing, 60.0), family, answering(policy), limits, media)


async def test_a_template_that_refuses_a_history_ends_that_sample_alone(family: ChatFamily) -> None:
    refused, sibling = await asyncio.gather(
        played(family, Message("user", "go"), Message("critic", "no")), played(family, Message("user", "go"))
    )
    assert refused.outcome is Outcome.ENVIRONMENT_ERROR and "no critics" in refused.info["error"]
    assert (sibling.outcome, sibling.response) == (Outcome.FINISHED, "ok")


class Broken:
    """Media of which none can be read."""

    kinds = ("image",)

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def prepare(self, messages: Any, owner: Any) -> None:
        raise self.error

    def fill_placeholders(self, rendered: Any, messages: Any) -> Any:
        return rendered


class Careful(Agent):
    """Asks again without what was refused."""

    async def run(self, task: Task, seed: int, session: Any) -> None:
        with suppress(PromptRefused):
            await session.restart(self.history).generate()
        await session.generate()


@pytest.mark.parametrize(
    ("agent", "error", "outcome"),
    [
        (Careful, MediaRefused("broken"), Outcome.FINISHED),
        (Agent, MediaRefused("broken"), Outcome.MEDIA_ERROR),
        (Careful, MediaUnavailable("away"), Outcome.MEDIA_ERROR),
    ],
)
async def test_an_environment_may_catch_the_refusal_of_a_medium_but_not_of_one_that_is_away(
    family: ChatFamily, agent: type[Agent], error: Exception, outcome: Outcome
) -> None:
    image = Message("user", (Part("see"), Part(media=Media("image", "a.png"))))
    trajectory = await played(family, image, agent=agent, media=Broken(error))
    assert trajectory.outcome is outcome and (not outcome.judged) == (str(error) in trajectory.info.get("error", ""))
    assert [message.text for message in trajectory.messages] == (["go", "ok"] if outcome.judged else ["go"])


async def test_halves_of_characters_are_read_as_the_replacement_character(family: ChatFamily) -> None:
    halved, whole = [await played(family, Message("user", f"go {text} on")) for text in ("\ud800", "\ufffd")]
    assert halved.outcome is Outcome.FINISHED
    assert [node.tokens for node in halved.forest] == [node.tokens for node in whole.forest]
