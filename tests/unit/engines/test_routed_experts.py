# SPDX-License-Identifier: Apache-2.0
"""Routed experts by position: each token keeps the experts of its sampling through turns, branches, retries and engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from relax_core.api.batch import AttemptId
from relax_core.api.engine import Delta
from relax_core.api.family import Rendered, Routing
from relax_core.api.task import Message
from relax_core.api.trajectory import Node, Outcome, Trajectory
from relax_core.engines.engine_state import response_fault
from relax_core.engines.requests import PendingRequest, RoutedExperts, filled, routed_columns
from relax_core.rewards.host import ScoredSample
from relax_core.sampling.rows import row_batch
from relax_core.sampling.session import Branch, Limits, Sample
from tests.unit.sampling.toy_policy import Completion, Letters, answered

ROUTING = Routing(2, 2, 200)
WIDE = Routing(1, 2, 300)


def experts_at(tokens: tuple[int, ...], position: int, engine: int = 0) -> bytes:
    """Choose as a policy at a position: the choice depends on all tokens up to there, and on the engine."""
    seed = hash((tokens[: position + 1], engine)) & 0xFFFFFFFF
    return bytes(np.random.default_rng(seed).integers(0, 200, 4, np.uint8))


def routed(prompt: tuple[int, ...], count: int, routing: Routing = ROUTING) -> PendingRequest:
    """A request whose experts are recorded."""
    return PendingRequest(prompt, count, id="r", routed_experts=RoutedExperts(routing))


def experts_of(tokens: tuple[int, ...], start: int = 0, engine: int = 0) -> bytes:
    return b"".join(experts_at(tokens, at, engine) for at in range(start, len(tokens)))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=8))
def test_the_first_report_of_a_position_is_kept_and_holes_are_marked(pieces: list[tuple[int, int]]) -> None:
    recorded, wanted = RoutedExperts(ROUTING), {}
    for number, (start, count) in enumerate(pieces):
        values = bytes([number % 200]) * (count * ROUTING.width)
        recorded.add(start, values)
        for at in range(start, start + count):
            wanted.setdefault(at, bytes([number % 200]) * ROUTING.width)
    told, known = recorded.between(0, 32)
    for at in range(32):
        assert told[at * 4 : at * 4 + 4] == wanted.get(at, bytes(4))
        assert known[at] == (at in wanted)


@given(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_a_request_that_changes_its_engine_keeps_the_experts_of_its_tokens(
    prompt: int, lives: list[int], data: st.DataObject
) -> None:
    """Each engine runs the whole of it again, and tells what it makes of it."""
    pending = routed(tuple(range(prompt)), 100)
    for engine, count in enumerate(lives):
        asked = pending.continuation()
        new = tuple(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
        whole, first = (*asked.tokens, *new), len(asked.tokens) - 1
        split = data.draw(st.integers(0, count - 1))
        told = experts_of(whole[:-1], 0, engine)
        cut = (first + split) * 4
        if split:
            pending.add(Delta("r", new[:split], (-1.0,) * split, 0, 0, "", routed_experts=told[:cut]))
        rest, begins = (told[cut:], first + split) if split else (told, 0)
        last = Delta("r", new[split:], (-1.0,) * (count - split), 0, 0, "abort", "", rest, begins)
        assert response_fault(last, pending, 0, 0) == ""
        pending.add(last)
    recorded = pending.routed_experts
    assert recorded is not None
    tokens = (*pending.prompt, *pending.tokens)
    values, known = recorded.between(0, len(tokens))
    assert known == b"\1" * (len(tokens) - 1) + b"\0"
    at = prompt - 1
    owners = [0] * at + [engine for engine, count in enumerate(lives) for _ in range(count)]
    for position in range(len(tokens) - 1):
        assert values[position * 4 : position * 4 + 4] == experts_at(tokens, position, owners[position])


def test_a_restarted_batch_drops_its_routed_experts() -> None:
    for settled in (False, True):
        pending = routed((1, 2), 5)
        pending.add(Delta("r", (3,), (-1.0,), 0, 0, "", routed_experts=experts_of((1, 2))))
        pending.settled = settled
        again = pending.restarted(())
        assert again.routed_experts is not None and len(again.routed_experts) == len(again.tokens) == 0
        assert (again is pending) is not settled, "what was read stays"


@pytest.mark.parametrize(
    ("routing", "start", "values", "message"),
    [
        (ROUTING, 0, b"\0" * 5, "5 bytes of routed experts"),
        (ROUTING, 2, b"\0" * 8, "from position 2"),
        (ROUTING, -1, b"\0" * 4, "from position -1"),
        (ROUTING, 0, b"\0\0\0\xc8", "expert 200 of 200"),
        (WIDE, 0, b"\0\0\x2c\1", "expert 300 of 300"),
    ],
)
def test_an_engine_that_reports_impossible_experts_fails(
    routing: Routing, start: int, values: bytes, message: str
) -> None:
    pending = routed((1, 2), 5, routing)
    delta = Delta("r", (3,), (-1.0,), 0, 0, "", "", values, start)
    assert message in response_fault(delta, pending, 0, 0)


def sampled(call: PendingRequest, tokens: tuple[int, ...], engine: int = 0) -> PendingRequest:
    """A turn as an engine answers it: all that it fed is told, its last token is not."""
    recorded = RoutedExperts(ROUTING)
    recorded.add(0, experts_of((*call.prompt, *tokens)[:-1], 0, engine))
    return answered(call, Completion(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), routed_experts=recorded))


def sample() -> Sample:
    async def nobody(requests: Sequence[PendingRequest]) -> None:
        raise NotImplementedError

    return Sample(Letters(), nobody, Limits(50, max_turns=50), lambda observation: (Message("user", str(observation)),))


turns = st.lists(
    st.tuples(st.sampled_from(["turn", "fork"]), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3)),
    min_size=1, max_size=7,
)  # fmt: skip


@given(turns, st.data())
def test_rows_keep_token_order_over_turns_and_branches(
    played: list[tuple[str, list[int], int]], data: st.DataObject
) -> None:
    own = sample()
    branches = [Branch(own, "ab", Rendered((1, 2, 3)), 0)]
    for what, tokens, said in played:
        branch = branches[data.draw(st.integers(0, len(branches) - 1))]
        if what == "fork":
            branch = branch.fork()
            branches.append(branch)
        for word in range(said):
            branch.observe(f"o{word}")
        call = branch.begin()
        branch.take(sampled(call, tuple(tokens)))
    trajectory = own.trajectory()
    judged = ScoredSample(1.0)
    batch, _ = row_batch([(AttemptId(0, 0, 0), trajectory, judged)], routing=ROUTING)
    experts, valid = batch.columns["routed_experts"], batch.columns["routed_valid"]
    assert experts.values.dtype == np.uint8 and experts.values.shape[1:] == (2, 2)
    for ids, chosen, known in zip(batch.columns["tokens"].rows(), experts.rows(), valid.rows(), strict=True):
        row = tuple(ids.tolist())
        assert known[:-1].all()
        for position in range(len(row) - 1):
            assert chosen[position].tobytes() == experts_at(row, position)
    leaves = {node.parent for node in trajectory.forest}
    ends = [node for number, node in enumerate(trajectory.forest) if number not in leaves]
    assert not any(node.routed_valid.endswith(b"\1") for node in ends)


def test_a_later_turn_fills_the_last_token_and_what_was_observed() -> None:
    own = sample()
    branch = Branch(own, "ab", Rendered((1, 2, 3)), 0)
    call = branch.begin()
    branch.take(sampled(call, (4, 5), engine=1))
    assert own.forest[1].routed_valid == b"\1\0"
    branch.observe("seen")
    call = branch.begin()
    branch.take(sampled(call, (6,), engine=2))
    assert [node.routed_valid for node in own.forest] == [b"\1\1\1", b"\1\1", b"\1" * len(own.forest[2].tokens), b""]
    tokens = branch._tokens
    first, second = own.forest[1].routed_experts[:4], own.forest[1].routed_experts[4:]
    assert (first, second) == (experts_at(tokens, 3, 1), experts_at(tokens, 4, 2))


def test_unknown_experts_are_zeros_marked_as_invalid() -> None:
    node, lengths = Node(None, (1, 2), False), np.array([2])
    assert filled(node, 0, RoutedExperts(ROUTING)) is None
    columns = routed_columns([((node, False),)], WIDE, lengths)
    assert columns["routed_valid"].values.tolist() == [0, 0]
    assert columns["routed_experts"].values.dtype == np.uint16
    assert Trajectory((), "", (node,), Outcome.FINISHED).forest[0].routed_valid == b""
