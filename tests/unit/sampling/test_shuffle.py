# SPDX-License-Identifier: Apache-2.0
"""The order of tasks: whole epochs, and a function of seed and epoch alone."""

from hypothesis import given, strategies as st

from relax_core.sampling.groups import Shuffle, ShuffleOptions


@given(st.integers(1, 60), st.integers(0, 5), st.integers(0, 2**40))
def test_every_task_comes_once_an_epoch(num_tasks, epoch, seed):
    groups = range(epoch * num_tasks, (epoch + 1) * num_tasks)
    assert sorted(Shuffle().pick(group, num_tasks, seed) for group in groups) == list(range(num_tasks))


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(1, 200), st.integers(0, 100))
def test_a_pick_depends_on_nothing_that_was_picked_before(groups, num_tasks, seed):
    used = Shuffle()
    for group in groups:
        used.pick(group, num_tasks, seed)
    assert [used.pick(group, num_tasks, seed) for group in groups] == [
        Shuffle().pick(group, num_tasks, seed) for group in groups
    ]


def test_seeds_and_epochs_differ_and_the_order_is_the_same_on_every_machine():
    def order(seed, epoch):
        return [Shuffle().pick(epoch * 8 + place, 8, seed) for place in range(8)]

    assert order(0, 0) == [2, 0, 5, 7, 4, 6, 1, 3]
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_of_the_file_can_be_kept():
    sampler = Shuffle(ShuffleOptions(shuffle=False))
    assert [sampler.pick(group, 3, 1) for group in range(7)] == [0, 1, 2, 0, 1, 2, 0]
