# SPDX-License-Identifier: Apache-2.0
"""Branches that an environment names, gives tools of their own, or never wants to be trained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from relax_core.api import Action, Message, Node, Outcome, Tool, Trajectory
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.episode import Limits
from tests.unit.sampling.toy_policy import Completion, Script, completion, driven, play, texts


async def played(drive: Callable[[Any], Awaitable[None]], *said: str) -> tuple[Trajectory, Script]:
    policy = Script(*said)
    return await play(driven(drive), policy), policy


async def test_seeds_of_branches_depend_on_their_names_and_not_on_their_order() -> None:
    async def one_way(session: Any) -> None:
        for name in ("left", "right"):
            await session.fork(name).generate()

    async def other_way(session: Any) -> None:
        right, left = session.fork("right"), session.fork("left")
        session.fork()  # an unnamed one changes nothing for them
        await right.generate()
        await left.generate()

    (_, one), (_, other) = await played(one_way, "a", "b"), await played(other_way, "a", "b")
    assert [call.seed for call in one.calls] == [call.seed for call in reversed(other.calls)]
    assert len({call.seed for call in one.calls}) == 2


async def test_a_restart_may_have_tools_of_its_own_and_hands_them_to_its_forks() -> None:
    async def drive(session: Any) -> None:
        assert not (await session.generate()).tool_calls
        helper = session.restart((Message("user", "help"),), (Tool("find", {"q": str}),), "helper")
        first = await helper.generate()
        second = await helper.fork().generate()
        assert [call.name for call in (*first.tool_calls, *second.tool_calls)] == ["find", "find"]

    call = '<tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>'
    trajectory, _ = await played(drive, call, call, call)
    assert trajectory.outcome is Outcome.FINISHED and len(trajectory.rows()) == 2


async def test_an_action_has_its_prompts_length_and_whether_a_limit_ended_it() -> None:
    seen: list[tuple[bool, int]] = []

    async def drive(session: Any) -> None:
        for bound in (2, None):
            action = await session.generate(bound)
            seen.append((action.cut, action.prompt_tokens))

    _, policy = await played(drive, "long", "b")
    assert seen == [(True, len(policy.calls[0].prompt)), (False, len(policy.calls[1].prompt))]


async def test_a_discarded_turn_is_in_no_row_and_counted_under_its_reason() -> None:
    async def drive(session: Any) -> None:
        await session.generate()
        lost, kept = session.fork("lost"), session.fork("kept")
        for branch in (lost, kept):
            branch.observe("go on")
            await branch.generate()
        lost.discard("undelivered")
        session.reward(1.0)

    trajectory, _ = await played(drive, "plan", "nobody", "read")
    assert texts(trajectory) == ["[user:go][a:PLAN$][user:go on][a:READ$"]
    assert trajectory.num_discarded == {"undelivered": len("nobody$")}
    assert trajectory.num_sampled == len("plan$nobody$read$")


async def test_a_sample_with_only_discarded_turns_has_nothing_to_train() -> None:
    async def drive(session: Any) -> None:
        await session.generate()
        session.discard("superseded")

    trajectory, _ = await played(drive, "gone")
    assert trajectory.rows() == () and trajectory.num_discarded == {"superseded": len("gone$")}


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(-1, 12), st.booleans(), st.booleans()), max_size=14))
def test_every_sampled_token_is_trained_once_or_was_discarded(drawn: list[tuple[int, bool, bool]]) -> None:
    """Over forests of any shape: (parent, sampled, discarded)."""
    forest = [
        Node(
            parent if 0 <= parent < number else None, (number,), sampled, *(((-1.0,), (0,)) if sampled else ()),
            discarded="lost" if sampled and discarded else "",
        )
        for number, (parent, sampled, discarded) in enumerate(drawn)
    ]  # fmt: skip
    trajectory = Trajectory((), "", tuple(forest))
    trained = [
        token for row in trajectory.rows() for token, mask in zip(row.tokens, row.loss_mask, strict=True) if mask
    ]
    assert sorted(trained) == [n for n, node in enumerate(forest) if node.sampled and not node.discarded]
    lost = {n for n, node in enumerate(forest) if node.discarded}
    assert not lost & {row.tokens[-1] for row in trajectory.rows()}, "no row ends in a discarded turn"


async def test_a_prompt_without_a_turn_is_left_out_of_the_messages() -> None:
    async def with_a_prompt_of_its_own(session: Any) -> None:
        session.note({"of": "its own"})
        await session.restart((Message("user", "mine"),)).generate()

    async def never(session: Any) -> None:
        session.restart((Message("user", "mine"),))

    async def by_forks(session: Any) -> None:
        for branch in (session.fork(), session.fork()):
            await branch.generate()

    said = []
    for drive in (with_a_prompt_of_its_own, never, by_forks):
        trajectory, _ = await played(drive, "a", "b")
        said.append([message.text for message in trajectory.messages])
    asked = said[1][0]
    assert said == [["mine", "a"], [asked], [asked, "a", "b"]]
    assert (await played(with_a_prompt_of_its_own, "a"))[0].info == {"of": "its own"}


class Letters:
    """A policy that samples letter after letter."""

    def __init__(self, said: str) -> None:
        self.said = said

    async def __call__(self, call: PendingRequest) -> Completion:
        for end in range(1, len(self.said) + 1):
            await asyncio.sleep(0)
            if call.watch is not None and call.watch(tuple(map(ord, self.said[:end]))):
                return completion(self.said[:end], end)
        return completion(self.said)


@pytest.mark.parametrize(
    ("said", "stop", "told", "text"),
    [
        ("four", (), ["f", "fo", "fou", "four"], "four"),
        ("one.two", (".",), ["o", "on", "one"], "one."),
        ("go <tool_call>x", (), [], "go <tool_call>x"),
    ],
    ids=["whole", "cut", "with tools"],
)
async def test_partial_text_is_reported_during_sampling_and_never_changes(
    said: str, stop: tuple[str, ...], told: list[str], text: str
) -> None:
    heard: list[Action] = []

    async def drive(session: Any) -> None:
        tools = (Tool("find", {"q": str}),) if "<" in said else ()
        branch = session.restart((Message("user", "a"),), tools)
        assert (await branch.generate(None, stop, heard.append)).text == text

    assert (await play(driven(drive), Letters(said))).outcome is Outcome.FINISHED
    assert [one.text for one in heard if one.text] == told


async def test_reports_of_a_long_turn_become_rarer() -> None:
    heard: list[Action] = []

    async def drive(session: Any) -> None:
        await session.generate(None, (), heard.append)

    await play(driven(drive), Letters("x" * 5000), limits=Limits(6000, 8))
    lengths = [len(one.text) for one in heard]
    assert lengths[:65] == list(range(65)) and len(lengths) < 400
    assert all(after - before <= before // 64 + 1 for before, after in pairwise(lengths))
