# SPDX-License-Identifier: Apache-2.0
"""A completion that passed a stop text is cut behind it, in all that it has of each token."""

from __future__ import annotations

import pytest

from relax_core.api.trajectory import Outcome
from relax_core.engines.requests import stop_end
from relax_core.sampling.episode import InProcess, Limits, SingleTurn
from tests.unit.sampling.toy_policy import Completion, Script, play


def _decode(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


async def test_a_cut_completion_keeps_what_its_first_tokens_had() -> None:
    said = Completion(
        tuple(map(ord, "abENDcd")), tuple(-0.1 * n for n in range(7)), tuple(range(7)), tuple(range(7)), "length"
    )
    trajectory = await play(InProcess(SingleTurn(), 0.0), Script(said), limits=Limits(7, stop=("END",)))
    turn = trajectory.forest[1]
    assert _decode(turn.tokens) == "abEND"
    assert (turn.log_probs, turn.versions) == (tuple(-0.1 * n for n in range(5)), tuple(range(5)))
    assert trajectory.newest == {0: 4}
    assert trajectory.outcome is Outcome.FINISHED, "it stopped before its limit"


def test_a_completion_without_the_text_stays_as_it_was() -> None:
    assert stop_end([97, 98], ("END",), _decode) is None
    assert stop_end([97, 98], (), _decode) is None


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 100])
def test_the_cut_is_behind_the_first_stop_text_wherever_it_is(length: int) -> None:
    for end in range(1, length + 1):
        said = ["x"] * length
        said[end - 1] = "END"
        assert stop_end(range(length), ("END",), lambda tokens, said=said: "".join(said[n] for n in tokens)) == end
    assert stop_end(range(4), ("b", "a"), lambda tokens: "".join("xaba"[n] for n in tokens)) == 2
    assert stop_end(range(4), ("ab",), lambda tokens: "".join(("a", "", "b", "ab")[n] for n in tokens)) == 3


@pytest.mark.parametrize(("past", "times"), [(0, 4), (3, 8), (1000, 30), (15_999, 30)])
def test_the_cut_of_a_long_completion_decodes_few_tokens(past: int, times: int) -> None:
    decoded = 0

    def decode(tokens: tuple[int, ...]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return "".join(map(chr, tokens))

    length = 16_000
    tokens = [97] * (length - past - 1) + [98] + [97] * past
    assert stop_end(tokens, ("b",), decode) == length - past
    assert decoded <= times * length
