# SPDX-License-Identifier: Apache-2.0
"""Drafted tokens change no sample: the first tokens that agree with the draft are kept, and one more."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st
from relax_plugin_vllm.sampler import kept


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4), min_size=1, max_size=5), st.data()
)
def test_tokens_are_kept_up_to_the_first_that_differs_from_its_draft(pairs: list[list[tuple[int, int]]], data) -> None:
    last = [data.draw(st.integers(0, 2)) for _ in pairs]
    drawn = [[token for token, _ in row] + [end] for row, end in zip(pairs, last, strict=True)]
    counts = [len(row) for row in drawn]
    tokens, rows = kept(
        np.array([token for row in drawn for token in row]), counts,
        np.array([draft for row in pairs for _, draft in row], np.int64),
    )  # fmt: skip
    places = rows.reshape(tokens.shape)
    ends = [0, *np.cumsum(counts)]
    for own, given_row, found, at, (start, _) in zip(
        drawn, pairs, tokens.tolist(), places, pairwise(ends), strict=True
    ):
        right = next((i for i, (token, draft) in enumerate(given_row) if token != draft), len(given_row))
        assert found == own[: right + 1] + [-1] * (len(found) - right - 1)
        assert at[: right + 1].tolist() == list(range(start, start + right + 1))
