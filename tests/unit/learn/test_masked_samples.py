# SPDX-License-Identifier: Apache-2.0
"""Masking a truncated sample changes nothing of the advantages of the remaining samples."""

import numpy as np
import pytest

from relax_core.api.algorithm import Algorithm, Source
from relax_core.api.batch import AttemptId, Column, Ragged
from relax_core.api.trajectory import Node, Outcome, Trajectory
from relax_core.learn.groups import MixedAlgorithm, credited
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.host import ScoredSample
from relax_core.sampling.rows import row_batch, with_row_column

CATALOGUE = Catalogue.load()
OPTIONS = {
    "grpo": [{}, {"credit_by": "context"}, {"reward_kl_coef": 0.1}, {"aggregation": "trajectory"}],
    "dapo": [{"overlong_length": 8, "overlong_buffer": 4}],
    "reinforce-plus-plus": [{}, {"reward_kl_coef": 0.1}],
    "gigpo": [{}, {"gamma": 0.5, "normalise": "none"}],
    "gdpo": [{}, {"weights": {"form": 1.0}}],
    "ppo": [{}, {"reward_kl_coef": 0.1, "lam": 0.9}],
    "distillation": [{}, {"reward_coef": 0.5, "discount": 0.9}],
}
NAMES = [
    name for name in sorted(CATALOGUE.names("algorithm"))
    if CATALOGUE.target("algorithm", name).source is Source.ROLLOUT
]  # fmt: skip
CASES = [(name, options) for name in NAMES for options in OPTIONS.get(name, [{}])]


def build(name, options):
    target = CATALOGUE.target("algorithm", name)
    return target(target.options_model()(**options))


def sample(group, number, lengths, reward, outcome=Outcome.FINISHED):
    """A sample of one row with a turn for each of `lengths`; each turn but the last earned 0.25."""
    nodes = []
    for turn, length in enumerate(lengths):
        nodes.append(Node(len(nodes) - 1 if nodes else None, (1, 2), sampled=False))
        probability = -0.1 * (1 + number + turn)
        nodes.append(Node(len(nodes) - 1, (3,) * length, True, (probability,) * length, (4,) * length, turn))
    steps = (0.25,) * (len(lengths) - 1)
    states, contexts = tuple(range(len(lengths))), ("plan", "do", "check")[: len(lengths)]
    trajectory = Trajectory((), "", tuple(nodes), outcome, states=states, contexts=contexts, newest={0: 4})
    parts = {"right": reward, "form": float(number % 2)}
    return AttemptId(group, number, 0), trajectory, ScoredSample(reward + sum(steps), parts, steps, outcome)


SAMPLES = [
    sample(0, 0, (1,), 1.0), sample(0, 1, (2, 3), 1.0), sample(0, 2, (1, 1), 0.5),
    sample(0, 3, (4, 6), 0.0, Outcome.TRUNCATED),
    sample(1, 0, (3,), 0.0), sample(1, 1, (6,), 1.0, Outcome.TRUNCATED),
    sample(2, 0, (1, 2, 2), 1.0), sample(2, 1, (2,), 0.0), sample(2, 2, (1,), 0.0, Outcome.REWARD_ERROR),
]  # fmt: skip


def advantages(algorithm: Algorithm, samples, masks):
    """Return the advantages of each sample's tokens, and the seals, with `masks` as `rollout.truncated`."""
    asked = {"tokens", "loss_mask", "rewards", *(column.name for column in algorithm.advantage_columns())}
    batch, seals = row_batch(samples, asked=asked, masks_truncated=masks)
    lengths = batch.columns["tokens"].lengths
    for number, name in enumerate(sorted(asked - batch.columns.keys())):  # columns of other roles
        noise = np.random.default_rng(number).normal(size=40 * len(SAMPLES))
        place = np.concatenate(
            [40 * 3 * row.group + 40 * row.sample // 3 + np.arange(n) for row, n in zip(batch.ids, lengths)]
        )
        batch = batch.with_columns({name: Ragged(noise[place].astype(np.float32), lengths)})
    if "algorithm_index" in asked:
        batch = with_row_column(
            batch, Column("algorithm_index", "int32", per="row"), [row.group % 2 for row in batch.ids]
        )
    weights = {"right": 1.0, "form": 0.5}
    columns = credited(algorithm, batch, {seal.attempt: seal for seal in seals}, sorted(asked), weights)
    rows = zip(batch.ids, columns["advantages"].rows(), strict=True)
    return {(row.group, row.sample): values.tolist() for row, values in rows}, {seal.attempt: seal for seal in seals}


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name} {options or ''}" for name, options in CASES])
def test_masking_a_sample_changes_no_advantage_of_another_sample(name, options):
    whole, _ = advantages(build(name, options), SAMPLES, masks=False)
    masked, seals = advantages(build(name, options), SAMPLES, masks=True)
    for attempt, trajectory, _ in SAMPLES:
        key = attempt[:2]
        if trajectory.outcome is Outcome.TRUNCATED:
            assert not any(masked[key]) and seals[attempt].masked
            assert any(whole[key]) or name == "remax", "remax has no greedy sample here"
        elif trajectory.outcome.judged:
            assert masked[key] == whole[key]
        else:
            assert key not in masked
    cut = [one for one in SAMPLES if one[1].outcome is not Outcome.TRUNCATED]
    if name not in ("reinforce", "remax", "distillation"):  # these compare no samples
        without, _ = advantages(build(name, options), cut, masks=False)
        assert any(without[key] != masked[key] for key in without), "the masked sample counts"


def test_the_parts_of_a_mixture_count_masked_samples():
    parts = [("grpo", build("grpo", {})), ("opo", build("opo", {}))]
    mixed = MixedAlgorithm.of(parts)
    whole, masked = (advantages(mixed, SAMPLES, masks)[0] for masks in (False, True))
    assert masked[0, 0] == whole[0, 0] and masked[1, 0] == whole[1, 0] and not any(masked[1, 1])


@pytest.mark.parametrize(("name", "options", "want"), [
    ("opo", {}, 10 / 13), ("gigpo", {}, 1.0), ("grpo", {}, 0.5), ("grpo", {"credit_by": "context"}, 0.5), ("dr-grpo", {}, 0.25),
])  # fmt: skip
def test_advantages_of_right_samples_beside_a_truncated_sample(name, options, want):
    """Three right samples of one token each, and one truncated sample of ten tokens."""
    samples = [sample(0, number, (1,), 1.0) for number in range(3)] + [sample(0, 3, (10,), 0.0, Outcome.TRUNCATED)]
    found, _ = advantages(build(name, options), samples, masks=True)
    assert [found[0, number][-1] for number in range(3)] == pytest.approx([want] * 3, abs=1e-5)
    assert not any(found[0, 3])


def test_a_masked_sample_keeps_its_overlong_penalty():
    """All four are right; the truncated sample has a reward of 1 and a penalty of -1."""
    samples = [*(sample(0, number, (1,), 1.0) for number in range(3)), sample(0, 3, (10,), 1.0, Outcome.TRUNCATED)]
    found, _ = advantages(build("dapo", {"overlong_length": 10, "overlong_buffer": 5}), samples, masks=True)
    assert [found[0, number][-1] for number in range(3)] == pytest.approx([0.5] * 3, abs=1e-5)
