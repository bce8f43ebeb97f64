# SPDX-License-Identifier: Apache-2.0
"""Episodes with a scripted policy: what is trained, what is masked, and how each way of ending is called."""

from __future__ import annotations

import asyncio
from itertools import pairwise, product
from typing import Any

import pytest

from relax_core.api import Action, Environment, InfrastructureError, Message, Observation, Outcome, Step, Task, Tool
from relax_core.api.errors import PoolFailed
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.episode import InProcess, Limits, SingleTurn
from relax_core.sampling.session import sample_seeds, turn_seed
from tests.unit.roles.virtual_time import run_virtual
from tests.unit.sampling.toy_policy import Completion, Letters, Script, answered, completion, driven, play, texts


class Echo(Environment):
    """Says back what it hears, pays 1 for each turn, is done at `bye`."""

    in_process = True
    closed = 0
    hangs = False

    async def reset(self, task: Task, seed: int) -> Observation | None:
        return Observation("hi") if task.metadata.get("greet") else None

    async def step(self, action: Action) -> Step:
        if action.text == "raise":
            raise RuntimeError("echo broke")
        if action.text == "hang":
            self.hangs = True
            await asyncio.sleep(1000)
        return Step(f"you said {action.text}", action.text == "bye", 1.0, {"last": action.text})

    async def close(self) -> None:
        type(self).closed += 1


class Asked(Environment):
    """A tool user."""

    in_process = True
    tools = (Tool("search", {"query": str}),)

    async def reset(self, task: Task, seed: int) -> Observation | None:
        return None

    async def step(self, action: Action) -> Step:
        return Step(str(action.tool_calls[0].arguments["query"]) if action.tool_calls else "", not action.tool_calls)


def here(environment: Environment, timeout_s: float = 60.0, total_timeout_s: float = 0.0) -> InProcess:
    return InProcess(environment, timeout_s, total_timeout_s)


async def test_a_single_turn_is_two_nodes_and_one_row() -> None:
    policy = Script("pong")
    trajectory = await play(here(SingleTurn()), policy)
    assert texts(trajectory) == ["[user:go][a:PONG$"]
    assert (trajectory.response, trajectory.outcome) == ("pong", Outcome.FINISHED)
    assert trajectory.messages == (Message("user", "go"), Message("assistant", "pong"))
    (row,) = trajectory.rows()
    assert row.log_probs[-5:] == completion("pong").log_probs
    assert row.versions[-5:] == (5,) * 5
    assert row.versions[0] == -1
    assert policy.calls[0].seed == turn_seed(7, 0)
    assert policy.calls[0].stop_tokens == (0,)


async def test_later_turns_append_only_and_sampled_ids_come_back_as_they_were() -> None:
    policy = Script("one", "two", "bye")
    trajectory = await play(here(Echo()), policy)
    assert texts(trajectory) == ["[user:go][a:ONE$][user:you said one][a:TWO$][user:you said two][a:BYE$"]
    for before, after in pairwise(policy.calls):
        assert after.prompt[: len(before.prompt)] == before.prompt
    assert trajectory.step_rewards == (1.0, 1.0, 1.0)
    assert trajectory.info == {"last": "bye"}
    assert trajectory.messages[-1] == Message("user", "you said bye")
    assert len({call.seed for call in policy.calls}) == 3


async def test_a_greeting_is_part_of_the_first_prompt() -> None:
    task = Task("t", (Message("user", "go"),), metadata={"greet": True})
    assert texts(await play(here(Echo()), Script("bye"), task)) == ["[user:go][user:hi][a:BYE$"]


async def test_a_bare_string_continues_as_bare_text() -> None:
    assert texts(await play(here(Echo()), Script("a", "bye"), Task("t", "go:"))) == ["go:A$you said aBYE$"]


async def test_a_token_is_as_old_as_the_oldest_cache_it_attended_to() -> None:
    mixed = Completion((97, 98, 0), (-1.0, -1.0, -1.0), (4, 5, 5), (4, 3, 5))
    policy = Script(mixed, "bye")
    trajectory = await play(here(Echo()), policy)
    assert trajectory.forest[1].versions == (4, 3, 5)
    assert trajectory.newest == {0: 5}, "the weights that sampled it, whatever they attended to"


async def test_a_sample_that_continued_over_a_rollback_knows_the_newest_step_of_each_incarnation() -> None:
    carried = Completion((97, 98, 0), (-1.0, -1.0, -1.0), (4, 4, 4), incarnations=((0, 0), (2, 1)))
    later = Completion((97, 0), (-1.0, -1.0), (5, 6), incarnations=((0, 1),))
    trajectory = await play(here(Echo()), Script(carried, later, "bye"))
    assert trajectory.newest == {0: 5, 1: 6}, "the last turn is of the first incarnation's step 5"


def test_a_completion_that_is_cut_keeps_the_weights_of_what_is_left() -> None:
    carried = Completion((97, 98, 99, 100), (-1.0,) * 4, (4, 4, 5, 1), incarnations=((0, 0), (2, 1), (3, 2)))
    request = answered(PendingRequest((1,), 9), carried)
    assert [request.newest(end) for end in (2, 3, 4)] == [[(0, 4)], [(0, 4), (1, 5)], [(0, 4), (1, 5), (2, 1)]]


@pytest.mark.parametrize(
    ("limits", "lines", "expected"),
    [
        (Limits(3, 8, 0, 0), ["four"], "[user:go][a:FOU"),
        (Limits(100, 2, 0, 0), ["a", "b"], "[user:go][a:A$][user:you said a][a:B$"),
        (Limits(100, 8, 16, 0), ["abcd"], "[user:go][a:ABCD"),
        (Limits(100, 8, 43, 0), ["abcd", "efg"], "[user:go][a:ABCD$][user:you said abcd][a:EF"),
        (Limits(100, 8, 0, 16), ["abcd"], "[user:go][a:ABCD"),
        (Limits(100, 8, 0, 40), ["abcd"], "[user:go][a:ABCD$"),
    ],
)
async def test_running_out_is_truncation(limits: Limits, lines: list[str], expected: str) -> None:
    trajectory = await play(here(Echo()), Script(*lines), limits=limits)
    assert trajectory.outcome is Outcome.TRUNCATED
    assert texts(trajectory) == [expected]


@pytest.mark.parametrize("failure", [Completion((), (), (), (), "error", "out of memory"), InfrastructureError("gone")])
async def test_an_engine_that_fails_is_an_outcome(failure: Any) -> None:
    trajectory = await play(here(Echo()), Script("a", failure))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert any(word in trajectory.info["error"] for word in ("memory", "gone"))


async def test_a_sample_of_a_pool_without_engines_has_no_outcome() -> None:
    """Another start of the run may have some: the sample is issued again, whether or not its environment would catch it."""
    with pytest.raises(PoolFailed):
        await play(here(Echo()), Script("a", PoolFailed("engine-0 failed 8 times in a row")))


async def test_an_environment_that_raises_is_an_outcome_and_is_closed() -> None:
    closed = Echo.closed
    trajectory = await play(here(Echo()), Script("a", "raise"))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "echo broke" in trajectory.info["error"]
    assert "test_episode.py" in trajectory.info["error"]
    assert Echo.closed == closed + 1


async def test_an_environment_that_hangs_is_an_outcome_and_is_closed() -> None:
    closed = Echo.closed
    trajectory = await play(here(Echo(), timeout_s=0.05), Script("hang"))
    assert trajectory.outcome is Outcome.ENVIRONMENT_TIMEOUT
    assert Echo.closed == closed + 1


async def test_close_runs_when_the_episode_is_cancelled_or_the_policy_has_a_bug() -> None:
    closed = Echo.closed
    with pytest.raises(ZeroDivisionError):
        await play(here(Echo()), Script(ZeroDivisionError()))
    environment = Echo()
    episode = asyncio.ensure_future(play(here(environment, 100), Script("hang")))
    while not environment.hangs:
        await asyncio.sleep(0)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert Echo.closed == closed + 2


async def test_calls_are_parsed_and_a_wrong_call_is_reported_to_the_policy() -> None:
    policy = Script(
        "<tool_call>{oops</tool_call>",
        '<tool_call>{"name": "find", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>',
        "done",
    )
    trajectory = await play(here(Asked()), policy)
    said = [message for message in trajectory.messages if message.role in ("tool", "user")]
    assert [message.role for message in said] == ["user", "tool", "tool", "user"]
    assert "there is no tool 'find'" in said[2].text
    assert said[3].text == "q"
    assert trajectory.outcome is Outcome.FINISHED


async def test_a_branching_environment_gives_three_rows_and_trains_each_token_once() -> None:
    async def branching(session: Any) -> None:
        await session.generate()
        other = session.fork()
        session.observe("left")
        other.observe("right")
        await session.generate()
        await other.generate()
        fresh = session.restart((Message("user", "sum"),))
        action = await fresh.generate(max_new_tokens=2)
        session.reward(float(len(action.tokens)))

    policy = Script("plan", "l", "r", "xyz")
    trajectory = await play(driven(branching), policy)
    assert trajectory.outcome is Outcome.FINISHED
    assert texts(trajectory) == [
        "[user:go][a:PLAN$][user:left][a:L$",
        "[user:go][a:plan$][user:right][a:R$",
        "[user:sum][a:XY",
    ]
    assert sum(node.sampled for node in trajectory.forest) == 4
    assert trajectory.step_rewards == (2.0,)
    assert len({call.seed for call in policy.calls}) == 4
    assert [message.text for message in trajectory.messages] == ["go", "plan", "left", "l", "right", "r", "sum", "xy"]


async def test_forks_before_the_first_turn_share_their_prompt() -> None:
    async def twins(session: Any) -> None:
        await asyncio.gather(session.generate(), session.fork().generate())

    trajectory = await play(driven(twins), Script("a", "b"))
    assert texts(trajectory) == ["[user:go][a:A$", "[user:go][a:B$"]
    assert [node.parent for node in trajectory.forest] == [None, 0, 0]


def test_a_driving_environment_has_time_of_its_own() -> None:
    """The deadline stands still while a turn is sampled, and counts when none is."""

    async def slow(session: Any) -> None:
        await session.generate()
        await asyncio.sleep(1000)

    async def late(call: Any) -> Completion:
        await asyncio.sleep(20.0)
        return completion("ok")

    trajectory = run_virtual(play(driven(slow, timeout_s=5.0), late))
    assert trajectory.response == "ok"
    assert trajectory.outcome is Outcome.ENVIRONMENT_TIMEOUT


async def dawdling(session: Any) -> None:
    """It takes its time before every turn, and never too much at once."""
    while True:
        await asyncio.sleep(4.0)
        await session.generate()


class DawdlingInSteps(Echo):
    async def step(self, action: Action) -> Step:
        await asyncio.sleep(4.0)
        return await super().step(action)


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize(("total_timeout_s", "turns"), [(9.0, 2), (0.0, 8), (100.0, 8)])
def test_the_time_of_all_calls_is_bounded_without_that_of_the_turns(in_steps, total_timeout_s, turns) -> None:
    async def late(call: Any) -> Completion:
        await asyncio.sleep(5.0)
        return completion("ok")

    times = (5.0, total_timeout_s)
    environment = here(DawdlingInSteps(), *times) if in_steps else driven(dawdling, *times)
    trajectory = run_virtual(play(environment, late))
    # An environment in steps is asked after a step whether it may go on.
    assert len(trajectory.states) == turns + (turns == 2 and in_steps)
    if turns == 2:
        assert trajectory.outcome is Outcome.ENVIRONMENT_TIMEOUT
        assert "more than the 9 s of the environment's `total_timeout_s`" in trajectory.info["error"]
    else:
        assert trajectory.outcome is Outcome.TRUNCATED


async def test_a_driving_environment_that_does_not_stop_asking_is_cut() -> None:
    async def greedy(session: Any) -> None:
        while True:
            try:
                await session.generate()
            except ValueError:
                continue
            session.observe("more")

    trajectory = await play(driven(greedy), Script("a", "b", "c"), limits=Limits(10, 3))
    assert trajectory.outcome is Outcome.TRUNCATED
    assert len([node for node in trajectory.forest if node.sampled]) == 3


def test_seeds_are_63_bit_and_differ_by_every_part() -> None:
    groups = list(product(range(3), range(20), range(3)))
    seeds = {seed for run, group, retry in groups for seed in sample_seeds(run, group, range(8), retry)}
    turns = {turn_seed(seed, turn) for seed in list(seeds)[:100] for turn in range(8)}
    assert len(seeds) == 8 * len(groups)
    assert len(turns) == 800
    assert not seeds & turns
    assert all(0 <= seed < 2**63 for seed in seeds | turns)
    assert sample_seeds(1, 2, [3, 5], 4)[:1] == sample_seeds(1, 2, [3], 4) == [1852695968745914623]


async def test_calls_are_read_with_the_tools_and_the_tokens_that_the_turn_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def parse(self: Letters, tokens: Any, tools: Any = (), before: Any = ()) -> tuple[str, Any, str]:
        seen.append((tokens, tools, before))
        return self.decode(tokens), (), ""

    monkeypatch.setattr(Letters, "parse", parse)
    policy = Script("one")
    await play(here(Asked()), policy)
    assert seen == [(completion("one").tokens, Asked.tools, policy.calls[0].prompt)]
