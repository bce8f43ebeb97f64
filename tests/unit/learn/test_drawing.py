# SPDX-License-Identifier: Apache-2.0
"""Draws: counter-based uniforms and the distribution that tokens come from."""

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from relax_core.learn.logits import CHOICES, Rules, distribution, draw, uniforms

CPU = torch.device("cpu")


def rules(vocab_size: int, suppress=(), **fields) -> Rules:
    rows = len(next(iter(fields.values()), suppress)) or 1
    choices = np.zeros(rows, np.dtype(list(CHOICES)))
    choices["temperature"] = choices["top_p"] = 1
    for name, values in fields.items():
        choices[name] = values
    return Rules.of(choices, suppress, vocab_size, CPU)


def splitmix64(state: int) -> int:
    """The published generator, in plain integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_mixing_is_splitmix64() -> None:
    gamma, seed, position = 0x9E3779B97F4A7C15, 12345, 7
    mixed = splitmix64((seed - gamma) % 2**64)
    want = splitmix64((mixed + position * gamma) % 2**64) >> 12
    got = uniforms(np.array([seed], np.uint64), np.array([position]))
    assert got[0] == want * 2.0**-52


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    for seeds, positions in ((np.arange(20000), np.zeros(20000)), (np.zeros(20000), np.arange(20000))):
        drawn = uniforms(seeds.astype(np.uint64), positions.astype(np.int64))
        counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 60
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


@settings(max_examples=100)
@given(st.lists(st.floats(-40, 40), min_size=2, max_size=20), st.floats(0, 1, exclude_max=True), st.data())
def test_draw_is_the_inverse_of_the_cumulative_distribution(logits: list[float], u: float, data: st.DataObject) -> None:
    banned = data.draw(st.sets(st.integers(0, len(logits) - 1), max_size=len(logits) - 1))
    u = min(u, 1 - 2.0**-52)
    table = torch.tensor([logits], dtype=torch.float32)
    drawn = draw(table, np.array([u]), rules(len(logits), suppress=[tuple(banned)]))
    token = int(drawn.tokens[0])
    probs = distribution(table, rules(len(logits), suppress=[tuple(banned)]))[0].double().exp().numpy()
    assert token not in banned
    assert probs[token] > 0
    before, total = probs[:token].sum(), probs.sum()
    assert before - 1e-9 <= u * total <= before + probs[token] + 1e-9
    np.testing.assert_allclose(drawn.log_probs[0], np.log(probs[token]), atol=1e-6)


def test_largest_uniform_still_draws_a_possible_token() -> None:
    table = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    assert draw(table, np.array([1 - 2.0**-52]), rules(4)).tokens[0] == 1


def test_rows_keep_their_own_rules() -> None:
    table = torch.tensor([[2.0, 1.0, 0.0]]).expand(4, 3).contiguous()
    chosen = rules(3, temperature=[1, 0, 0.5, 1], top_k=[0, 0, 0, 2], top_p=[1, 1, 1, 1])
    got = distribution(table, chosen).double().exp().numpy()
    for row, scaled in enumerate(([2, 1, 0], [2, 1, 0], [4, 2, 0], [2, 1, -np.inf])):
        np.testing.assert_allclose(got[row], np.exp(scaled) / np.exp(scaled).sum(), atol=1e-6)
    assert draw(table, np.full(4, 1 - 2.0**-52), chosen).tokens.tolist() == [2, 0, 2, 1]


def test_top_p_counts_what_top_k_left() -> None:
    table = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = distribution(table, rules(4, top_k=[2], top_p=[0.6])).exp()
    np.testing.assert_allclose(kept[0], [1, 0, 0, 0], atol=1e-6)


def test_broken_logits_are_detected_by_their_log_prob() -> None:
    table = torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])
    drawn = draw(table, np.array([0.5, 0.5]), rules(2, temperature=[1, 1]))
    assert np.isfinite(drawn.log_probs).tolist() == [True, False]


def test_a_greedy_row_ignores_top_p() -> None:
    table = torch.tensor([[0.5, 0.3, 0.2]]).log()
    drawn = draw(table, np.array([0.99]), rules(3, temperature=[0], top_p=[0.1]))
    assert drawn.tokens.tolist() == [0]
    np.testing.assert_allclose(drawn.log_probs[0], np.log(0.5), atol=1e-6)
