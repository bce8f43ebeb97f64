# SPDX-License-Identifier: Apache-2.0
"""GRPO against plain loops, against numbers worked by hand, and against itself under every split that must not matter."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from relax_plugin_policy_gradient.grpo import GRPO, GRPOOptions

from relax_core import learn
from relax_core.api import AttemptId, Outcome, Ragged, RowBatch, RowId, Sealed

F64, F32 = np.float64, np.float32


def batch_of(rows, dtype=F64, indices=None, offset=0):
    chosen = list(range(len(rows))) if indices is None else list(indices)

    def column(name, kind):
        return Ragged.of([np.array(rows[i][name], dtype=kind) for i in chosen])

    ids = tuple(RowId(i // 3, i % 3, 0, 0) for i in chosen)
    columns = {
        "tokens": column("tokens", np.int32),
        "loss_mask": column("mask", np.uint8),
        "old_log_probs": column("old", dtype),
        "ref_log_probs": column("ref", dtype),
        "rollout_log_probs": column("rollout", dtype),
        "advantages": Ragged.of([np.full(len(rows[i]["tokens"]), rows[i]["advantage"], dtype) for i in chosen]),
    }
    return RowBatch(ids, columns)


def run(rows, options, temperature=1.0, dtype=torch.float64, parts=None, max_logits=2**25):
    """Loss and d loss / d logits by row, with the rows split into `parts` as micro-batches are."""
    algorithm = GRPO(GRPOOptions(**options))
    logits = [torch.tensor(row["logits"], dtype=dtype, requires_grad=True) for row in rows]
    numpy_dtype = F64 if dtype == torch.float64 else F32
    whole = batch_of(rows, numpy_dtype)
    denominators = learn.Denominators(learn.count(whole))
    total = torch.zeros((), dtype=torch.float64)
    for part in parts or [range(len(rows))]:
        batch = learn.PackedBatch(batch_of(rows, numpy_dtype, part), dtype=dtype)
        packed = torch.cat([logits[i] for i in part])
        trained = batch.loss_mask.nonzero().squeeze(1)
        scored = learn.score_distribution(
            packed[trained], lambda x: x, batch.tokens[trained], learn.Wanted(bool(options.get("entropy_coef"))),
            vocab_size=packed.shape[1], temperature=temperature, max_logits=max_logits,
        )  # fmt: skip
        empty = scored["log_probs"].new_zeros(len(batch.tokens))
        values = {name: empty.index_put((trained,), value) for name, value in scored.items()}
        loss = sum(learn.reduce(algorithm.loss(batch, learn.Outputs(values)), batch, denominators).values())
        loss.backward()
        total += loss.detach()
    return float(total), [x.grad if x.grad is not None else torch.zeros_like(x) for x in logits]


OPTIONS = st.fixed_dictionaries(
    {
        "clip_low": st.sampled_from([0.1, 0.2]),
        "clip_high": st.sampled_from([0.2, 0.28]),
        "kl_coef": st.sampled_from([0.0, 0.04, 1.0]),
        "entropy_coef": st.sampled_from([0.0, 0.01]),
        "aggregation": st.sampled_from(["sequence", "token", "fixed"]),
        "correction": st.sampled_from(["truncate", "none"]),
    }
).map(lambda options: {**options, "fixed_length": 7 if options["aggregation"] == "fixed" else 0})


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), options=OPTIONS, temperature=st.sampled_from([1.0, 0.7]))
def test_loss_and_gradient_equal_the_reference(reference, draw_rows, seed, options, temperature):
    rows = draw_rows(seed, temperature=temperature)
    want, want_gradient = reference.loss_and_gradient(rows, options, temperature)
    got, got_gradient = run(rows, options, temperature)
    assert got == pytest.approx(want, abs=1e-9)
    for have, must in zip(got_gradient, want_gradient, strict=True):
        assert torch.allclose(have, torch.tensor(must, dtype=torch.float64), rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), options=OPTIONS)
def test_float32_stays_within_1e_5_of_the_reference(reference, draw_rows, seed, options):
    rows = draw_rows(seed)
    want, want_gradient = reference.loss_and_gradient(rows, options, 1.0)
    got, got_gradient = run(rows, options, dtype=torch.float32)
    assert got == pytest.approx(want, abs=1e-5)
    for have, must in zip(got_gradient, want_gradient, strict=True):
        assert torch.allclose(have.double(), torch.tensor(must, dtype=torch.float64), rtol=1e-4, atol=1e-5)


REWARDS = st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=5)


@given(groups=REWARDS)
def test_advantages_equal_the_reference(reference, groups):
    rewards = torch.tensor(groups, dtype=torch.float64)
    got = learn.group_mean_std(rewards, torch.ones_like(rewards, dtype=torch.bool))
    want = torch.tensor(reference.advantages(groups), dtype=torch.float64)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


def test_a_hand_worked_example():
    """One group, two samples, vocabulary of two; clip 0.2 / 0.2, kl_coef 0.1, mean by sequence.

    Rewards 1 and 0: mean 1/2, unbiased std 1/sqrt(2), so A = +a and -a with a = (1/2) / (1/sqrt(2) + 1e-6) = 0.7071058.
    Every trained token has probability 1/2 under the policy (logits 0, 0), log-prob -ln 2.
    """
    a = 0.5 / (1 / math.sqrt(2) + 1e-6)
    lp = -math.log(2)
    rows = [
        # ratio 1.5: clipped to 1.2 as A > 0, no gradient; ratio 1: gradient. Both with ref = policy: no divergence.
        {"logits": [[0, 0]] * 3, "tokens": [0, 0, 0], "mask": [0, 1, 1], "advantage": a,
         "old": [0, lp - math.log(1.5), lp], "ref": [0, lp, lp], "rollout": [0, lp - math.log(1.5), lp]},
        # ratio 1/2: below 0.8 with A < 0, so clipped to 0.8. ref = 2 x policy: k3 = 2 - ln 2 - 1 = 0.3068528.
        {"logits": [[0, 0]] * 2, "tokens": [0, 0], "mask": [0, 1], "advantage": -a,
         "old": [0, lp + math.log(2)], "ref": [0, lp + math.log(2)], "rollout": [0, lp + math.log(2)]},
    ]  # fmt: skip
    loss, gradient = run(rows, {"kl_coef": 0.1})
    # policy: -( (1.2 a + 1 a) / 2 - 0.8 a ) / 2 = -0.15 a = -0.1060659;  kl: 0.1 x (0 + 0.3068528) / 2 = 0.0153426
    assert loss == pytest.approx(-0.15 * a + 0.1 * (2 - math.log(2) - 1) / 2, abs=1e-12)
    assert loss == pytest.approx(-0.0907232, abs=1e-6)
    # d log-prob / d logits = (1 - 1/2, 0 - 1/2) = (0.5, -0.5)
    # sample 0, token 2: d loss / d log-prob = -a / (2 x 2) = -0.1767764
    assert gradient[0].tolist() == [[0, 0], [0, 0], pytest.approx([-a / 8, a / 8], abs=1e-12)]
    # sample 1: only the divergence, 0.1 x (1 - 2) / 2 = -0.05
    assert gradient[1][1].tolist() == pytest.approx([-0.025, 0.025], abs=1e-12)


def test_gradient_agrees_with_finite_differences(draw_rows):
    rows, options, step = draw_rows(5), {"kl_coef": 0.1, "entropy_coef": 0.01}, 1e-6
    _, gradient = run(rows, options)
    for row, position, logit in ((0, len(rows[0]["tokens"]) - 1, 1), (4, len(rows[4]["tokens"]) - 1, 0)):
        original = rows[row]["logits"][position][logit]
        losses = []
        for moved in (original + step, original - step):
            rows[row]["logits"][position][logit] = moved
            losses.append(run(rows, options)[0])
        rows[row]["logits"][position][logit] = original
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(gradient[row][position][logit]), abs=1e-8)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), options=OPTIONS, data=st.data())
def test_micro_batches_and_order_do_not_matter(draw_rows, seed, options, data):
    rows = draw_rows(seed)
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(1, len(rows) - 1))
    whole, gradient = run(rows, options)
    parted, parted_gradient = run(rows, options, parts=[order[:cut], order[cut:]])
    assert parted == pytest.approx(whole, abs=1e-12)
    for have, want in zip(parted_gradient, gradient, strict=True):
        assert torch.allclose(have, want, rtol=0, atol=1e-12)


def test_slices_of_logits_do_not_matter(draw_rows):
    rows, options = draw_rows(3), {"entropy_coef": 0.01}
    whole, gradient = run(rows, options)
    sliced, sliced_gradient = run(rows, options, max_logits=10)
    assert sliced == pytest.approx(whole, abs=1e-12)
    for have, want in zip(sliced_gradient, gradient, strict=True):
        assert torch.allclose(have, want, rtol=0, atol=1e-12)


def test_what_stands_at_masked_positions_does_not_matter(draw_rows):
    rows, options = draw_rows(8), {"kl_coef": 0.1, "entropy_coef": 0.01}
    loss, gradient = run(rows, options)
    for row in rows:
        for t, trained in enumerate(row["mask"]):
            if not trained:
                row["old"][t] = row["ref"][t] = row["rollout"][t] = math.nan
                row["logits"][t] = [math.inf] * len(row["logits"][t])
    poisoned, poisoned_gradient = run(rows, options)
    assert poisoned == loss
    for row, have, want in zip(rows, poisoned_gradient, gradient, strict=True):
        assert torch.equal(have, want)
        assert not have[torch.tensor(row["mask"]) == 0].any()


def test_groups_of_equal_rewards_have_no_gradient_at_all():
    rewards = torch.full((2, 8), 0.1, dtype=torch.float64)
    advantages = learn.group_mean_std(rewards, torch.ones(2, 8, dtype=torch.bool))
    assert not advantages.any()


def test_members_without_a_verdict_neither_count_nor_get_one():
    samples = {
        AttemptId(7, sample, 0): Sealed(AttemptId(7, sample, 0), 1, outcome, reward, trained_tokens=1)
        for sample, (reward, outcome) in enumerate(
            [
                (1.0, Outcome.FINISHED),
                (0.0, Outcome.TRUNCATED),
                (5.0, Outcome.REWARD_TIMEOUT),
                (math.nan, Outcome.FINISHED),
            ]
        )
    }
    mask = Ragged(np.tile([0, 1], 4).astype(np.uint8), np.full(4, 2))
    rows = RowBatch(tuple(RowId(7, sample, 0, 0) for sample in (2, 0, 3, 1)), {"loss_mask": mask})
    grouping = learn.Grouping(rows, samples)
    column = grouping.columns(GRPO().advantages(grouping.groups))["advantages"]
    high = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert column.values.tolist() == pytest.approx([0, 0, 0, high, 0, 0, 0, -high], abs=1e-6)


def test_fixed_length_is_refused_where_it_has_no_effect():
    with pytest.raises(ValueError, match="fixed_length"):
        GRPOOptions(fixed_length=5)
    with pytest.raises(ValueError, match="fixed_length"):
        GRPOOptions(aggregation="fixed")


def test_what_it_asks_for_follows_from_its_options():
    plain, full = GRPO(), GRPO(GRPOOptions(kl_coef=0.1, entropy_coef=0.1))
    truncates = GRPO(GRPOOptions(correction="truncate"))
    assert {column.name for column in plain.columns()} == {"advantages", "rollout_log_probs"}
    assert {column.name for column in truncates.columns()} == {"advantages", "old_log_probs", "rollout_log_probs"}
    assert {column.name for column in full.columns()} == {"advantages", "ref_log_probs", "rollout_log_probs"}
    assert {output.name for output in full.outputs()} == {"log_probs", "entropy"}
    assert plain.zero_advantage_skips and not full.zero_advantage_skips
