# SPDX-License-Identifier: Apache-2.0
"""What travels arrives as it was, alone or many of a kind."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.api import AttemptId, Delta, GenerateRequest, Message, Outcome
from relax_core.api.trajectory import Node, Trajectory
from relax_core.rpc import messages

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
def test_what_travels_arrives_as_it_was(value: Any) -> None:
    assert messages.decode(messages.encode(value)) == (tuple(value) if isinstance(value, list) else value)


def test_a_kind_that_is_not_known_is_refused_alone_or_in_numbers() -> None:
    for sent in (DELTAS, DELTAS[:1]):
        with pytest.raises(ValueError, match="unknown type"):
            messages.decode(messages.encode(sent).replace(b"Delta", b"Other"))
