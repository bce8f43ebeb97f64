# SPDX-License-Identifier: Apache-2.0
"""The signalling game: two conversations of one policy, paid together, and no pay for what is no signal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError
from relax_plugin_chat.chat import ChatFamily

from relax_contrib.recipes.families import EOS, save_tokenizer
from relax_contrib.recipes.signalling.build import SIGNALS, WORDS
from relax_contrib.signalling import Signalling, SignallingOptions
from relax_core.api import Message, Outcome, Task, Trajectory
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.episode import InProcess, Limits, run_episode
from relax_core.testing.environment import EnvironmentSuite
from tests.unit.sampling.toy_policy import Completion, answering


class TestSignalling(EnvironmentSuite):
    component = "signalling"
    options = {"signals": list(SIGNALS)}
    tasks = (Task("one", "say fox", "fox"), Task("two", "say owl", "owl"))
    turns = ("ba", "fox")


@pytest.fixture(scope="module")
def family(chat_family: Any) -> ChatFamily:
    opened: ChatFamily = chat_family(partial(save_tokenizer, WORDS))
    return opened


async def play(family: ChatFamily, says: dict[str, str], meaning: str = "fox") -> tuple[Trajectory, list[str]]:
    """One episode of a policy that answers prompts by a table; and the prompts that it read."""
    heard: list[str] = []

    async def policy(call: PendingRequest) -> Completion:
        heard.append(family.decode(call.prompt))
        tokens = (*family.encode(says[heard[-1]]), EOS)
        return Completion(tokens, (-1.0,) * len(tokens), (0,) * len(tokens))

    task = Task("t", (Message("user", f"say {meaning}"),), meaning)
    options = SignallingOptions(signals=SIGNALS, listener="hear {signal}")
    environment = InProcess(Signalling(options), 5.0)
    prompt = family.start(task.prompt)
    return await run_episode(task, prompt, 1, environment, family, answering(policy), Limits(3, 2)), heard


async def test_both_roles_are_paid_for_a_meaning_that_comes_across(family: ChatFamily) -> None:
    game, heard = await play(family, {"say fox": "ki", "hear ki": "fox"})
    assert heard == ["say fox", "hear ki"]
    assert (game.environment_reward, game.outcome) == (1.0, Outcome.FINISHED)
    rows = [[t for t, mask in zip(row.tokens, row.loss_mask, strict=True) if mask] for row in game.rows()]
    assert [family.decode(row) for row in rows] == ["ki", "fox"]
    assert [family.decode(row.tokens) for row in game.rows()] == ["say fox ki", "hear ki fox"]


async def test_a_meaning_that_is_not_understood_is_not_paid(family: ChatFamily) -> None:
    game, _ = await play(family, {"say fox": "ki", "hear ki": "owl"})
    assert (game.environment_reward, game.outcome) == (0.0, Outcome.FINISHED)


@pytest.mark.parametrize("said", ["fox", "ba ba", ""])
async def test_an_invalid_signal_reaches_no_listener_and_earns_nothing(family: ChatFamily, said: str) -> None:
    game, heard = await play(family, {"say fox": said})
    assert heard == ["say fox"]
    assert (game.environment_reward, game.outcome) == (0.0, Outcome.FINISHED)


def test_a_listener_prompt_without_the_signal_is_refused() -> None:
    with pytest.raises(ValidationError, match="without {signal}"):
        SignallingOptions(signals=SIGNALS, listener="guess")
