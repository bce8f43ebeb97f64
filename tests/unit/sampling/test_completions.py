# SPDX-License-Identifier: Apache-2.0
"""Metrics of completions: lengths, and repetition against a plain count of n-grams."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, strategies as st

from relax_core.api.trajectory import Node, Outcome, Trajectory
from relax_core.observe.completions import completion_metrics
from relax_core.sampling.rows import NGRAM, completion_values, repeated_ngrams


def sample(*turns: list[int], outcome: Outcome = Outcome.FINISHED) -> Trajectory:
    prompt = Node(None, tuple(range(20)) * 2, False)
    return Trajectory((), "", (prompt, *(Node(0, tuple(turn), True) for turn in turns)), outcome)


def metrics(samples: Sequence[Trajectory]) -> dict[str, float]:
    return completion_metrics(completion_values(samples))


@given(st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 2**31 - 1), max_size=60))
def test_repetition_counts_the_ngrams_that_were_seen_before(tokens: list[int]) -> None:
    ngrams = [tuple(tokens[at : at + NGRAM]) for at in range(len(tokens) - NGRAM + 1)]
    assert repeated_ngrams(tokens) == len(ngrams) - len(set(ngrams))


def test_a_loop_stands_out_and_the_prompt_and_other_turns_do_not_count() -> None:
    fresh, loop = list(range(NGRAM + 3)), [7] * (NGRAM + 9)
    got = metrics([sample(fresh, fresh), sample(loop, outcome=Outcome.TRUNCATED), sample([1, 2])])
    assert got["length/repeated"] == pytest.approx((0 + 9 / 10) / 2) and got["length/repeated_max"] == 0.9
    lengths = (len(loop), 2 * len(fresh), (2 * len(fresh) + 2) / 2)
    assert (got["length/completion_p50"], got["length/completion_max"], got["length/completion_finished"]) == lengths


def test_samples_without_tokens_have_lengths_and_no_samples_have_nothing() -> None:
    got = metrics([sample(outcome=Outcome.ENGINE_ERROR)])
    lengths = ("length/completion_p50", "length/completion_p90", "length/completion_max", "length/truncated")
    assert got == dict.fromkeys(lengths, 0)
    assert metrics([]) == {}


@given(
    st.lists(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=2), min_size=1, max_size=9),
    st.randoms(),
)
def test_the_order_of_samples_makes_no_difference(turns: list[list[list[int]]], random: Random) -> None:
    samples = [sample(*one, outcome=random.choice((Outcome.FINISHED, Outcome.TRUNCATED))) for one in turns]
    assert metrics(samples) == metrics(random.sample(samples, len(samples)))
