# SPDX-License-Identifier: Apache-2.0
"""A completion that passed a stop text is cut behind it, in all that it has of each token."""

from __future__ import annotations

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
