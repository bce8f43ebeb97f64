# SPDX-License-Identifier: Apache-2.0
"""The guessing game through the real chat family: hints are masked, halving wins, the reward is the environment's."""

from __future__ import annotations

from typing import Any

import pytest
from relax_plugin_chat.chat import ChatFamily

from relax_contrib.guess_number import GuessNumber, GuessNumberOptions
from relax_contrib.recipes.guess_number.build import GUESSES, LETTERS, PROMPT
from relax_contrib.recipes.quickstart.model import EOS, save_tokenizer
from relax_core.api import Message, Outcome, SystemClock, Task, Trajectory
from relax_core.engines.requests import PendingRequest
from relax_core.rewards.scorer import RewardScorer
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.episode import InProcess, Limits, run_episode
from relax_core.testing.environment import EnvironmentSuite
from tests.unit.sampling.toy_policy import Completion, Policy, answering


class TestGuessNumber(EnvironmentSuite):
    component = "guess-number"
    tasks = (Task("one", "?", "c"), Task("two", "?", "p"))
    turns = ("h", "d", "nothing", "c")


@pytest.fixture(scope="module")
def family(chat_family: Any) -> ChatFamily:
    opened: ChatFamily = chat_family(save_tokenizer)
    return opened


class Halving:
    """Guesses the middle of what the hints leave, read off the tokens it is given."""

    def __init__(self, family: ChatFamily) -> None:
        self._family = family

    async def __call__(self, call: PendingRequest) -> Completion:
        said = self._family.decode(call.prompt)[len(PROMPT) :]
        low, high = 0, len(LETTERS)
        for guess, hint in zip(said[::2], said[1::2], strict=True):
            at = LETTERS.index(guess)
            low, high = (low, at) if hint == "<" else (at + 1, high)
        tokens = (*self._family.encode(LETTERS[(low + high) // 2]), EOS)
        return Completion(tokens, (-1.0, 0.0), (0, 0))


async def play(family: ChatFamily, policy: Policy, secret: str, **options: int) -> Trajectory:
    task = Task(f"secret-{secret}", (Message("user", PROMPT),), secret)
    environment = InProcess(GuessNumber(GuessNumberOptions(**options)), 5.0)
    prompt = family.start(task.prompt)
    return await run_episode(task, prompt, 1, environment, family, answering(policy), Limits(2, GUESSES))


def always(family: ChatFamily, text: str) -> Policy:
    async def policy(call: PendingRequest) -> Completion:
        tokens = (*family.encode(text), EOS)
        return Completion(tokens, (-1.0,) * len(tokens), (0,) * len(tokens))

    return policy


async def test_halving_wins_fifteen_of_sixteen(family: ChatFamily) -> None:
    games = [await play(family, Halving(family), secret) for secret in LETTERS]
    assert sum(game.environment_reward for game in games) == 15
    assert all(game.outcome is Outcome.FINISHED for game in games)


async def test_hints_are_masked_and_guesses_are_trained(family: ChatFamily) -> None:
    (row,) = (await play(family, Halving(family), "k")).rows()
    shown = family.decode(row.tokens, skip_special=False).replace("<eos>", "$")
    assert shown == "?i$>m$<k$"
    trained = family.decode([t for t, mask in zip(row.tokens, row.loss_mask, strict=True) if mask])
    assert trained == "imk"
    assert [mask for token, mask in zip(row.tokens, row.loss_mask, strict=True) if token == EOS] == [1, 1, 1]


async def test_an_answer_that_is_not_a_letter_uses_a_guess(family: ChatFamily) -> None:
    game = await play(family, always(family, "7"), "k", guesses=3)
    assert game.step_rewards == (0.0, 0.0, 0.0)
    assert [message.text for message in game.messages] == ["?", "7", "!", "7", "!", "7", "!"]


async def test_a_secret_out_of_range_is_an_outcome_that_names_the_task(family: ChatFamily) -> None:
    game = await play(family, always(family, "a"), "z")
    assert game.outcome is Outcome.ENVIRONMENT_ERROR
    assert "secret-z" in game.info["error"]
    assert (await play(family, always(family, "z"), "z", size=26)).step_rewards == (1.0,)


async def test_without_rewards_the_hit_is_the_samples_value(family: ChatFamily) -> None:
    scorer = RewardScorer([], ProcessStarter(LocalWorkers()), SystemClock())
    games = [await play(family, always(family, "a"), secret) for secret in "ab"]
    ((hit, miss),) = await scorer.score([(Task("t", "?"), games)])
    assert (hit.value, miss.value) == (1.0, 0.0)
    assert miss.outcome is Outcome.FINISHED
