# SPDX-License-Identifier: Apache-2.0
"""What travels arrives as it was, alone or many of a kind."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from relax_core.api import AttemptId, Delta, GenerateRequest, Message, Outcome, Step, Task, Tool, ToolCall
from relax_core.api.trajectory import Node, Trajectory
from relax_core.rpc import messages
from relax_core.rpc.messages import PlainData

DELTAS = [Delta(str(n), (n, 2**40), (-0.5, -1.25), n, n, "stop", routed_experts=b"\0\1") for n in range(3)]
REQUESTS = tuple(GenerateRequest(str(n), (1, n), 8, seed=2**63 - 1 - n) for n in range(3))
NODES = (Node(None, (1, 2), False), Node(0, (3,), True, (-0.5,), (4,)))


@pytest.mark.parametrize(
    "value",
    [
        DELTAS, DELTAS[:1], [], REQUESTS, (REQUESTS, 1.5), (DELTAS[0], REQUESTS[0]), [*DELTAS, None],
        [Trajectory((Message("user", "go"),), "a", NODES, Outcome.TRUNCATED, info={"a": 1})] * 2,
        (AttemptId(1, 2, 3), AttemptId(4, 5, 6)), (Message("user", "a"), Message("user", "b")),
    ],
    ids=["many", "one", "none", "tuple", "arguments", "two kinds", "with another", "nested", "named", "messages"],
)  # fmt: skip
def test_messages_arrive_unchanged(value: Any) -> None:
    assert messages.decode(messages.encode(value)) == (tuple(value) if isinstance(value, list) else value)


def test_a_kind_that_is_not_known_is_refused_alone_or_in_numbers() -> None:
    for sent in (DELTAS, DELTAS[:1]):
        with pytest.raises(ValueError, match="unknown type"):
            messages.decode(messages.encode(sent).replace(b"Delta", b"Other"))


JSON = {"box": [1, 2.5, None], "rows": [{"at": [[1], []]}], "pair": (1, [2]), "none": [], "flat": "x"}


@pytest.mark.parametrize(
    "value",
    [
        ToolCall("f", JSON), Task("t", "?", ["a", ["b"]], JSON), Step("", True, info=JSON), Tool("f", JSON), PlainData(JSON),
        Trajectory((), "", (), Outcome.FINISHED, info=MappingProxyType(JSON)), Message("user", "", (ToolCall("f", JSON),)),
        Task("t", "?", None, {"made": Task("u", "?", [1]), "many": [Task("u", "?", [1])] * 2}),
        GenerateRequest("r", (1, 2), 8),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_field_arrives_as_it_was_lists_as_lists_and_tuples_as_tuples(value: Any) -> None:
    for sent in (value, (value, value), [value, value], (value, 1)):
        arrived = messages.decode(messages.encode(sent))
        assert repr(arrived[0] if isinstance(sent, tuple | list) else arrived) == repr(value).replace(
            f"mappingproxy({JSON})", str(JSON)
        )


def test_a_column_of_fields_of_several_kinds_arrives_as_it_was() -> None:
    made = tuple(Task("t", "?", answer) for answer in (None, [1], (1,), {"a": [1]}, "x", [Task("u", "?")]))
    assert repr(messages.decode(messages.encode(made))) == repr(made)


def test_large_arrays_are_sent_next_to_their_message() -> None:
    held = {"weights": np.arange(1 << 14), "names": ["a"]}
    beside: list[Any] = []
    sent = messages.encode(Step("", True, info=held), beside)
    arrived = messages.decode(sent, beside)
    assert len(beside) == 1 and len(sent) < 1 << 10
    assert (arrived.info["weights"] == held["weights"]).all() and arrived.info["names"] == ["a"]
