# SPDX-License-Identifier: Apache-2.0
"""Histories become branches: what the policy wrote is found again however a client sends it back, and is trained once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from relax_plugin_agents.history import Call, History, call_key
from relax_plugin_agents.model_request import ModelRequest, Refused

from relax_core.api import Environment, Message, Task, Tool, Trajectory
from relax_core.api.task import ToolCall
from relax_core.engines.requests import PendingRequest
from relax_core.sampling.episode import InProcess, Limits, run_episode
from tests.chat.tool_templates import TEMPLATES, open_family
from tests.unit.sampling.toy_policy import Completion, Script, answering, play, texts

FIND = Tool("find", {"type": "object", "properties": {"q": {"type": "string"}}})


class Client:
    """Asks with whole histories, as programs do."""

    def __init__(self, session: Any) -> None:
        self.history = History(session)

    async def ask(self, *messages: Message, tools: tuple[Tool, ...] = (), limit: int | None = None) -> Call:
        request = ModelRequest(messages, tools, limit)
        call = self.history.begin(request)
        self.history.answered(call, await call.branch.generate(limit))
        call.delivered = True
        return call


class Asked(Environment):
    """Lets a test be the agent."""

    in_process = True
    agent: Callable[[Client], Awaitable[None]]

    async def run(self, task: Task, seed: int, session: Any) -> None:
        client = Client(session)
        await self.agent(client)
        client.history.discard_unread()


async def sample(agent: Callable[[Client], Awaitable[None]], *said: Any) -> tuple[Trajectory, Script]:
    policy, environment = Script(*said), Asked()
    environment.agent = agent
    trajectory = await play(InProcess(environment, 60.0), policy, limits=Limits(400, 100))
    assert trajectory.outcome.judged, trajectory.info
    return trajectory, policy


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        ("<think>hm</think>four", "four"),
        ("<think>hm</think>\n\nfour", "<think>hm</think>\n\nfour"),
        (" four \n", "four"),
        ("four", "four\n"),
    ],
    ids=["thought left out", "whole", "stripped", "white space added"],
)
async def test_an_answer_is_known_again_as_clients_send_it(sampled: str, sent: str) -> None:
    async def agent(client: Client) -> None:
        await client.ask(user("a"))
        call = await client.ask(user("a"), assistant(sent), user("b"))
        assert call.reason == "continued"

    trajectory, _ = await sample(agent, sampled, "end")
    assert len(trajectory.rows()) == 1 and sum(trajectory.rows()[0].loss_mask) == len(sampled) + len("end") + 2


@pytest.mark.parametrize("beside", ["I look. ", ""])
async def test_calls_are_known_again_by_name_and_arguments(beside: str) -> None:
    """Other ids, another order of keys, and without the words that stood beside them."""
    call = json.dumps({"name": "find", "arguments": {"q": "x", "n": 1, "deep": {"b": 2, "a": 1}}})

    async def agent(client: Client) -> None:
        first = await client.ask(user("a"), tools=(FIND,))
        assert first.action is not None and first.action.tool_calls
        again = ToolCall("find", {"deep": {"a": 1, "b": 2}, "n": 1, "q": "x"}, "id-of-the-client")
        second = await client.ask(user("a"), assistant("", again), Message("tool", "found", name="find"), tools=(FIND,))
        assert second.reason == "continued"

    trajectory, _ = await sample(agent, f"{beside}<tool_call>{call}</tool_call>", "end")
    assert len(trajectory.rows()) == 1


def lookup(name: str, key: str) -> ToolCall:
    return ToolCall("find", {"q": key}, name)


def found(name: str, text: str) -> Message:
    return Message("tool", text, name="find", extra={"tool_call_id": name})


@pytest.mark.parametrize("kind", ["kimi", "hermes"])
async def test_results_of_a_sampled_turn_belong_to_the_calls_of_their_ids(tmp_path: Path, kind: str) -> None:
    """One template shows ids, which are those that the policy wrote; the other shows results in the order of calls."""
    _, template, end = TEMPLATES[kind]
    family = open_family(tmp_path, template, end)
    two = (lookup("client-a", "A"), lookup("client-b", "B"))
    said = [f"{called(kind, 0, 'A')}{called(kind, 1, 'B')}", called(kind, 2, "C"), "end"]
    turns = [(*family.encode(text), family.stop_tokens[0]) for text in said]
    shown: list[str] = []

    async def policy(request: PendingRequest) -> Completion:
        shown.append(family.decode(request.prompt, skip_special=False))
        tokens, count = turns[len(shown) - 1], len(turns[len(shown) - 1])
        return Completion(tokens, (-0.5,) * count, (1,) * count)

    async def agent(client: Client) -> None:
        asked = [user("a"), assistant("", *two), found("client-b", "is-B")]
        for more in (
            [],
            [found("client-a", "is-A")],
            [assistant("", lookup("client-c", "C")), found("client-c", "is-C")],
        ):
            asked += more
            call = await client.ask(*(asked if more else asked[:1]), tools=(FIND,))
            assert call.reason == ("continued" if more else "first")

    environment = Asked()
    environment.agent = agent
    task = Task("t", (user("go"),), "x")
    trajectory = await run_episode(
        task, family.start(task.prompt), 7, InProcess(environment, 60.0), family, answering(policy), Limits(400, 8)
    )
    assert trajectory.outcome.judged, trajectory.info
    results = re.findall(r"(?:Return of (functions\.find:\d)|<\|im_start\|>tool find)\s+(is-\w)", shown[-1])
    assert (
        results
        == {
            "kimi": [("functions.find:1", "is-B"), ("functions.find:0", "is-A"), ("functions.find:2", "is-C")],
            "hermes": [("", "is-A"), ("", "is-B"), ("", "is-C")],
        }[kind]
    )


def called(kind: str, number: int, key: str) -> str:
    if kind == "hermes":
        return f'<tool_call>{{"name": "find", "arguments": {{"q": "{key}"}}}}</tool_call>'
    call = f'functions.find:{number}<|tool_call_argument_begin|>{{"q": "{key}"}}<|tool_call_end|>'
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_calls_section_end|>"


def test_results_tell_histories_apart_by_the_calls_and_not_by_the_ids() -> None:
    def key(first: str, second: str, *results: tuple[str, str]) -> str:
        turn = assistant("", lookup(first, "A"), lookup(second, "B"))
        return call_key(ModelRequest((user("a"), turn, *(found(*result) for result in results))))

    in_order = key("x", "y", ("x", "1"), ("y", "2"))
    assert in_order == key("p", "q", ("p", "1"), ("q", "2"))
    without_ids = assistant("", lookup("", "A"), lookup("", "B")), found("", "1"), found("", "2")
    assert in_order == call_key(ModelRequest((user("a"), *without_ids)))
    others = [key("x", "y", ("y", "1"), ("x", "2")), key("x", "y", ("x", "1")), key("x", "y", ("y", "1"))]
    assert len({in_order, *others}) == 4


async def test_names_tell_histories_apart_but_do_not_make_an_answer_another() -> None:
    async def agent(client: Client) -> None:
        await client.ask(user("a"))
        named = Message("assistant", "one", name="solver", extra={"reasoning_content": "hm", "channel": "final"})
        assert (await client.ask(user("a"), named, user("b"))).reason == "continued"
        ann, bob = (Message("user", "a", name=name) for name in ("Ann", "Bob"))
        assert (await client.ask(ann)).reason == "new"
        assert (await client.ask(bob, assistant("three"), user("b"))).reason == "rewritten"
        given = [Message("assistant", "mine", name=name) for name in ("Ann", "Bob")]
        await client.ask(user("x"), given[0], user("y"))
        call = await client.ask(user("x"), given[1], user("y"), assistant("five"), user("z"))
        assert call.reason == "rewritten"

    await sample(agent, "one", "two", "three", "four", "five", "six")


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_further_fields_of_a_message_are_part_of_its_history(role: str) -> None:
    keys = {
        call_key(ModelRequest((message, user("b"))))
        for message in (Message(role, "a"), Message(role, "a", name="n"), Message(role, "a", extra={"x": 1}))
    }
    assert len(keys) == 3


async def test_changed_text_next_to_the_same_call_does_not_match_the_policys_turn() -> None:
    call = '<tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>'

    async def agent(client: Client) -> None:
        await client.ask(user("a"), tools=(FIND,))
        edited = assistant("Edited.", ToolCall("find", {"q": "x"}))
        assert (await client.ask(user("a"), edited, user("b"), tools=(FIND,))).reason == "rewritten"

    await sample(agent, f"I look. {call}", "end")


async def test_a_rewritten_answer_is_given_text_on_a_branch_behind_what_stood() -> None:
    async def agent(client: Client) -> None:
        await client.ask(user("a"))
        await client.ask(user("a"), assistant("one"), user("b"))
        call = await client.ask(user("a"), assistant("one"), user("b"), assistant("mine"), user("c"))
        assert call.reason == "rewritten"

    trajectory, _ = await sample(agent, "one", "two", "three")
    assert texts(trajectory) == [
        "[user:a][a:ONE$][user:b][a:TWO$",
        "[user:a][a:one$][user:b][assistant:mine][user:c][a:THREE$",
    ]


async def test_two_agents_with_equal_prompts_have_answers_of_their_own() -> None:
    async def agent(client: Client) -> None:
        await client.ask(user("a"))
        await client.ask(user("a"))
        for question in ("b", "c"):  # their answers are the same words: each goes on behind another
            await client.ask(user("a"), assistant("same"), user(question))

    trajectory, policy = await sample(agent, "same", "same", "left", "right")
    assert texts(trajectory) == ["[user:a][a:SAME$][user:b][a:LEFT$", "[user:a][a:SAME$][user:c][a:RIGHT$"]
    assert len({call.seed for call in policy.calls}) == 4


async def test_a_summary_that_the_policy_wrote_begins_a_conversation_as_given_text() -> None:
    async def agent(client: Client) -> None:
        await client.ask(user("a"))
        await client.ask(user("a"), assistant("long"), user("sum up"))
        assert (await client.ask(user("short: go on"))).reason == "new"

    trajectory, _ = await sample(agent, "long", "short", "on")
    assert texts(trajectory) == ["[user:a][a:LONG$][user:sum up][a:SHORT$", "[user:short: go on][a:ON$"]


async def test_a_change_of_tools_starts_another_conversation() -> None:
    async def agent(client: Client) -> None:
        await client.ask(user("a"))
        assert (await client.ask(user("a"), assistant("one"), user("b"), tools=(FIND,))).reason == "tools"

    trajectory, _ = await sample(agent, "one", "two")
    assert len(trajectory.rows()) == 2


async def test_an_answer_that_a_limit_cut_can_be_extended_and_an_ended_one_cannot() -> None:
    async def agent(client: Client) -> None:
        await client.ask(user("a"), limit=2)
        assert (await client.ask(user("a"), assistant("lo"), limit=50)).reason == "extended"
        assert (await client.ask(user("a"), assistant("long"), user("on"))).reason == "continued"
        await client.ask(user("b"))
        for said, why in (("end", "append a message after it"), ("mine", "did not write")):
            with pytest.raises(Refused, match=why):
                client.history.begin(ModelRequest((user("b"), assistant(said))))

    trajectory, _ = await sample(agent, "long", "ng", "more", "end")
    assert texts(trajectory) == ["[user:a][a:LONG$][user:on][a:MORE$", "[user:b][a:END$"]


async def test_a_nonce_in_the_system_prompt_does_not_start_another_conversation() -> None:
    def system(nonce: str) -> Message:
        return Message("system", f"x-anthropic-billing-header: cch={nonce};\nBe brief.")

    async def agent(client: Client) -> None:
        await client.ask(system("1"), user("a"))
        assert (await client.ask(system("2"), user("a"), assistant("one"), user("b"))).reason == "continued"

    trajectory, _ = await sample(agent, "one", "two")
    assert len(trajectory.rows()) == 1


async def test_unread_turns_are_counted_and_not_trained() -> None:
    async def agent(client: Client) -> None:
        await client.ask(user("a"))
        lost = await client.ask(user("a"), assistant("one"), user("b"))
        lost.delivered = False

    trajectory, _ = await sample(agent, "one", "nobody")
    assert texts(trajectory) == ["[user:a][a:ONE$"]
    assert trajectory.num_discarded == {"undelivered": len("nobody$")}


async def test_a_request_sent_again_is_the_same_call_until_something_is_built_on_it() -> None:
    async def agent(client: Client) -> None:
        call, request = await client.ask(user("a")), ModelRequest((user("a"),))
        assert client.history.same(request, again=True) is call
        assert client.history.same(request, again=False) is None, "another agent may ask the same"
        call.delivered = False
        assert client.history.same(request, again=False) is call, "nobody has read it"
        call.clients = 1
        assert client.history.same(request, again=False) is None, "somebody waits for it"
        assert client.history.same(request, again=True) is call
        assert client.history.same(ModelRequest((user("a"),), max_new_tokens=3), again=True) is None
        call.clients, call.delivered = 0, True
        await client.ask(user("a"), assistant("one"), user("b"))
        assert client.history.same(request, again=True) is None

    await sample(agent, "one", "two")


async def test_branches_draw_by_their_history_and_not_by_their_place_in_time() -> None:
    seeds: list[dict[str, list[int]]] = []
    for order in (("b", "c", "b"), ("c", "b", "b")):

        async def agent(client: Client, order: tuple[str, ...] = order) -> None:
            await client.ask(user("a"))
            for question in order:
                await client.ask(user("a"), assistant("one"), user(question))

        _, policy = await sample(agent, "one", "x", "x", "x")
        by_question: dict[str, list[int]] = {}
        for question, call in zip(order, policy.calls[1:], strict=True):
            by_question.setdefault(question, []).append(call.seed)
        seeds.append(by_question)
    assert seeds[0] == seeds[1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("pq"), st.booleans()), min_size=1, max_size=12))
def test_every_answer_is_trained_once_behind_exactly_what_its_engine_saw(
    steps: list[tuple[int, str, bool]],
) -> None:
    """Any tree of conversations: each step goes on after an earlier answer, or begins anew; some answers are never read."""
    answers = [f"answer {number}" for number in range(len(steps))]
    unread = 0

    async def agent(client: Client) -> None:
        nonlocal unread
        histories: list[tuple[Message, ...]] = [()]
        calls: list[Call] = []
        for number, (after, question, read) in enumerate(steps):
            said = (*histories[after % len(histories)], user(question))
            call = await client.ask(*said)
            call.delivered = read
            calls.append(call)
            if read:
                histories.append((*said, assistant(answers[number])))
        unread = sum(
            len(call.action.tokens) for call in calls if call.action and not (call.delivered or call.calls_after)
        )

    trajectory, policy = asyncio.run(sample(agent, *answers))
    rows = trajectory.rows()
    trained = sum(sum(row.loss_mask) for row in rows)
    assert trained == trajectory.num_sampled - unread
    assert sum(trajectory.num_discarded.values()) == unread
    ids = [tuple(map(ord, answer)) for answer in answers]
    for call, answer, (_, _, read) in zip(policy.calls, ids, steps, strict=True):
        whole = (*call.prompt, *answer)
        if read:
            assert any(row.tokens[: len(whole)] == whole for row in rows)


async def test_a_summary_explains_each_call_that_began_a_branch_of_its_own() -> None:
    told: dict[str, Any] = {}

    async def agent(client: Client) -> None:
        await client.ask(user("a"))
        for question in ("b", "c"):
            await client.ask(user("a"), assistant("one"), user(question))
        await client.ask(user("a"), assistant("mine"), user("b"))
        await client.ask(user("z"))
        await client.ask(user("z"), tools=(FIND,))
        await client.ask(user("z"))
        await client.ask(user("a"), assistant("one"), user("c"))
        client.history.begin(ModelRequest((user("y"),), (FIND,), overridden=("top_p", "seed")))
        told.update(json.loads(json.dumps(client.history.summary())))

    await sample(agent, "one", "two", "three", "four", "five", "six", "seven", "eight")
    assert told["calls"] == {
        "first": 1, "continued": 1, "branched": 1, "rewritten": 1, "new": 2, "tools": 1, "repeated": 2,
    }  # fmt: skip
    assert [(fork["call"], fork["reason"]) for fork in told["forks"]] == [
        (2, "branched"), (3, "rewritten"), (4, "new"), (5, "tools"), (6, "repeated"), (7, "repeated"), (8, "new"),
    ]  # fmt: skip
    assert [fork["equals"] for fork in told["forks"] if "equals" in fork] == [4, 2]
    assert all(fork["why"] for fork in told["forks"]) and told["overridden"] == ["seed", "top_p"]
