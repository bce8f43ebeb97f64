# SPDX-License-Identifier: Apache-2.0
"""Drafted tokens change no sample: the first tokens that agree with the draft are kept, and one more."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given, strategies as st
from relax_plugin_vllm.engine import VllmEngine
from relax_plugin_vllm.options import VllmOptions
from relax_plugin_vllm.sampler import kept

from relax_core.testing.engine_fixture import EngineFixture, tiny_qwen3

REPEATING = (5, 6, 7, 8) * 6
"""A prompt in which the last tokens stood before, so that every request begins with a draft."""


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


def test_samples_and_log_probs_are_those_without_drafts_and_drafts_are_counted(tmp_path: Path) -> None:
    """Drafts run in processes of their own: vLLM compiles code for them, and then can't start again in the same process."""
    model = tiny_qwen3(str(tmp_path), 1)
    found = {}
    for drafts in (0, 3):
        lab = EngineFixture(
            VllmEngine(VllmOptions(draft_tokens=drafts, tensor_parallel=2 if drafts else 1)), model, model
        ).start()
        prompts = (REPEATING, REPEATING[:9], (9, 4, 11))
        requests = [lab.request(prompt, 24, seed=seed) for seed, prompt in enumerate(prompts)]
        requests += [
            lab.request(REPEATING, 24, temperature=0.0),
            lab.request(REPEATING, 24, seed=9, top_k=3, num_top=2),
        ]
        found[drafts] = lab.generate(*requests)
        lab.stop()
    assert [got.tokens for got in found[3]] == [got.tokens for got in found[0]]
    for got, plain in zip(found[3], found[0], strict=True):
        np.testing.assert_allclose(got.log_probs, plain.log_probs, atol=1e-4)
        assert [[token for token, _ in pairs] for pairs in got.top] == [
            [token for token, _ in pairs] for pairs in plain.top
        ]
        assert plain.drafts is None
    counts = [got.drafts for got in found[3] if got.drafts is not None]
    assert all(0 <= kept <= drafted for kept, drafted in counts)
    assert sum(drafted for _, drafted in counts) > 0
    assert (
        found[3][3].drafts is not None and found[3][3].drafts[0] > 0
    )  # greedy samples of a tiny model repeat themselves
