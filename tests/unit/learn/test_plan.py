# SPDX-License-Identifier: Apache-2.0
from hypothesis import given, strategies as st

from relax_core.learn import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@given(lengths=LENGTHS, world_size=st.integers(1, 5), tokens=st.integers(1, 200))
def test_every_row_is_planned_once_and_ranks_have_as_many_batches(lengths, world_size, tokens):
    plan = plan_micro_batches(lengths, world_size, tokens).micro_batches
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(row for rank in plan for batch in rank for row in batch) == list(range(len(lengths)))


@given(lengths=LENGTHS, tokens=st.integers(1, 200))
def test_padding_stays_within_the_budget_unless_one_row_alone_exceeds_it(lengths, tokens):
    for batch in plan_micro_batches(lengths, 1, tokens).micro_batches[0]:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= tokens


def test_rows_of_like_length_share_a_batch():
    plan = plan_micro_batches([1, 9, 1, 9, 1, 9], 1, 27).micro_batches[0]
    assert [sorted(batch) for batch in plan] == [[1, 3, 5], [0, 2, 4]]


def test_ranks_get_a_fair_share_of_padded_tokens():
    lengths = [(7 * i) % 30 + 1 for i in range(200)]
    plan = plan_micro_batches(lengths, 4, 128).micro_batches
    loads = [sum(len(batch) * max(lengths[row] for row in batch) for batch in rank) for rank in plan]
    assert max(loads) - min(loads) <= 128
