# SPDX-License-Identifier: Apache-2.0
"""Seals that travel by columns arrive as they were, whatever their fields hold."""

from __future__ import annotations

from dataclasses import fields, replace

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Claim, Sealed
from relax_core.api.trajectory import Outcome
from relax_core.bus.store import Samples
from relax_core.rpc import messages

numbers = st.integers(0, 1 << 40)
seals = st.builds(
    Sealed, attempt=st.builds(AttemptId, numbers, numbers, numbers), num_rows=numbers, outcome=st.sampled_from(Outcome),
    reward=st.floats(allow_nan=False) | st.integers(-3, 3), floor=numbers, trained_tokens=numbers,
    parts=st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=2),
    newest=st.dictionaries(numbers, numbers, max_size=2),
)  # fmt: skip


@settings(max_examples=30)
@given(st.lists(seals, max_size=4))
def test_seals_and_the_samples_of_a_claim_arrive_as_they_were(made: list[Sealed]) -> None:
    claim = Claim(1, "actor", (), Samples.of(made), (3,))
    sent = messages.decode(messages.encode((tuple(made), claim, tuple(seal.attempt for seal in made))))
    assert sent == (tuple(made), claim, tuple(seal.attempt for seal in made))
    assert all(type(seal.attempt) is AttemptId for seal in (*sent[0], *sent[1].samples.values()))


@pytest.mark.parametrize("name", [field.name for field in fields(Sealed)])
def test_no_field_of_a_seal_is_lost(name: str) -> None:
    plain = Sealed(AttemptId(1, 2, 3), 4, Outcome.FINISHED)
    other = {"attempt": AttemptId(7, 7, 7), "outcome": Outcome.TRUNCATED, "parts": {"a": 1.0}, "reward": 0.5,
             "newest": {0: 9, 1: 3}}  # fmt: skip
    seal = replace(plain, **{name: other.get(name, 9)})
    for sent in (*messages.decode(messages.encode((seal,))), *messages.decode(messages.encode((seal, seal)))):
        assert getattr(sent, name) == getattr(seal, name) != getattr(plain, name)


def test_values_within_values_beyond_any_message_are_refused() -> None:
    body = b"\x01"
    for _ in range(600):  # decoding them all took the C stack, and the process with it
        body = msgpack.packb(msgpack.ExtType(3, body))
    with pytest.raises(ValueError, match="nested in more than"):
        messages.decode(body)


@pytest.mark.parametrize("value", [[4], [4, "token", 1], {"a": 1}, [4, 7], msgpack.ExtType(1, b"\x92\xa7Version\x90")])
def test_a_first_frame_is_a_protocol_and_a_token_and_builds_nothing(value: object) -> None:
    with pytest.raises(ValueError, match="must be a protocol number and a token"):
        messages.decode_hello(msgpack.packb(value))
    assert messages.decode_hello(msgpack.packb([4, "token"])) == (4, "token")
