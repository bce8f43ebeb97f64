# SPDX-License-Identifier: Apache-2.0
"""A completion that passed a stop text is cut behind it, in all that it has of each token."""

from __future__ import annotations

from relax_core.engines.requests import Completion, cut


def _decode(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


def test_a_cut_completion_keeps_what_its_first_tokens_had() -> None:
    whole = Completion(tuple(map(ord, "abENDcd")), tuple(-0.1 * n for n in range(7)), tuple(range(7)), tuple(range(7)))
    short = cut(whole, ("END",), _decode)
    assert _decode(short.tokens) == "abEND"
    assert (short.log_probs, short.versions, short.oldest_cache) == (
        tuple(-0.1 * n for n in range(5)), tuple(range(5)), tuple(range(5)),
    )  # fmt: skip
    assert short.finish == "stop"


def test_a_completion_without_the_text_stays_as_it_was() -> None:
    whole = Completion((97, 98), (-0.1, -0.2), (0, 0), finish="length")
    assert cut(whole, ("END",), _decode) is whole
