# SPDX-License-Identifier: Apache-2.0
"""One example of every algorithm, worked by hand, in its own setting: so that the references are judged as well."""

import math

import pytest

from relax_core.api import RowId
from tests.golden.bench import NAMES, build, credited, flat, learnt
from tests.golden.test_critic import fitted

A = 0.5 / (math.sqrt(0.5) + 1e-6)
"""GRPO's advantage of rewards 1 and 0: mean 1/2, unbiased standard deviation 1/sqrt(2). 0.7071058, and minus that."""
HALF = -math.log(2)


def group(*rewards, lengths=None, parts=None):
    """Samples with these rewards, of so many trained tokens behind one given token."""
    lengths = lengths or [1] * len(rewards)
    parts = parts or [{}] * len(rewards)
    return [
        {"reward": reward, "valid": True, "parts": part,
         "rows": [{"mask": [0] + [1] * n, "rollout": [0.0] * (n + 1), "ref": [0.0] * (n + 1)}]}
        for reward, n, part in zip(rewards, lengths, parts)
    ]  # fmt: skip


def rows(*samples):
    """(advantage, ratios): each token has probability 1/2 under the policy, 1 / (2 ratio) where the step started and where
    it was sampled, so the correction's weight is 1."""
    made = []
    for sample, (advantage, ratios) in enumerate(samples):
        started = [0.0] + [HALF - math.log(ratio) for ratio in ratios]
        made.append({
            "id": RowId(0, sample, 0, 0), "sample": sample, "mask": [0] + [1] * len(ratios),
            "log_probs": [0.0] + [HALF] * len(ratios), "old": started, "rollout": list(started), "ref": list(started),
            "entropy": [0.0] * len(started), "advantage": [advantage] * len(started),
        })  # fmt: skip
    return made


def exactly(value):
    return pytest.approx(value, abs=1e-9)


SPREAD = math.sqrt(1 / 3) + 1e-6
"""Standard deviation of (1, 1, 0), and of (1/2, 1/2, -1/2)."""
OVERLONG = 0.25 / (math.sqrt(0.125) + 1e-6)
"""GRPO's advantage of rewards 1 and 1/2."""
BOTH_RIGHT = 0.25 / (0.25 + 1e-6)
CREDITS = [
    ("grpo", {}, [group(1, 0)], [[A, -A]]),
    ("grpo", {"normalise": "none"}, [group(1, 0, 0)], [[2 / 3, -1 / 3, -1 / 3]]),
    ("dr-grpo", {}, [group(1, 0, 0)], [[2 / 3, -1 / 3, -1 / 3]]),
    # 3 tokens are one over 4 - 2: -1/2, so rewards 1 and 1 become 1 and 1/2
    ("dapo", {"overlong_length": 4, "overlong_buffer": 2}, [group(1, 1, lengths=[2, 3])], [[OVERLONG, -OVERLONG]]),
    ("rloo", {}, [group(1, 0, 0)], [[1, -0.5, -0.5]]),
    ("reinforce", {"baseline": 0.25}, [group(1, 0)], [[0.75, -0.25]]),
    # four samples, two of them tell: alpha = 2
    ("gpg", {}, [group(1, 0), group(1, 1)], [[1, -1], [0, 0]]),
    # baseline (1 x 1 + 3 x 0) / 4
    ("opo", {}, [group(1, 0, lengths=[1, 3])], [[0.75, -0.25]]),
    # mean 1/4: (1 - 1/4) / (1/4) = 3, the others -1; nobody right: nothing
    ("max-rl", {}, [group(1, 0, 0, 0), group(0, 0, 0, 0)], [[3 * BOTH_RIGHT, *[-BOTH_RIGHT] * 3], [0] * 4]),
    # tokens earn 1, 1 and 0: mean 2/3
    ("reinforce-plus-plus", {}, [group(1, 0, lengths=[2, 1])], [[[[0, *[1 / 3 / SPREAD] * 2]], [[0, -2 / 3 / SPREAD]]]]),
    # of the group 1/2 and -1/2; of tokens 1/2, 1/2, -1/2: mean 1/6
    (
        "reinforce-plus-plus-baseline", {}, [group(1, 0, lengths=[2, 1])],
        [[[[0, *[1 / 3 / SPREAD] * 2]], [[0, -2 / 3 / SPREAD]]]],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "groups", "want"), CREDITS)
def test_advantages(name, options, groups, want):
    assert flat(credited(build(name, options), groups)) == exactly(flat(want))


SIGMOID = 1 / (1 + math.exp(-2))
DELTA = {"divergence": "kl", "delta": 0.05}
LOSSES = [
    # (1.2 A + A) / 2 for the first row, of which 1.5 is clipped; 0.8 for the second, clipped from below; mean of two rows
    ("grpo", {}, [(A, [1.5, 1.0]), (-A, [0.5])], -(1.1 * A - 0.8 * A) / 2, [[0, -A / 4], [0]]),
    # sums: 2/3 (1.2 + 1), -1/3 x 0.8, -1/3; over three rows
    (
        "dr-grpo", {}, [(2 / 3, [1.5, 1.0]), (-1 / 3, [0.5]), (-1 / 3, [1.0])], -(2.2 * 2 / 3 - 0.8 / 3 - 1 / 3) / 3,
        [[0, -2 / 9], [0], [1 / 9]],
    ),
    # over three tokens; 1.5 is clipped at 1.28
    ("dapo", {}, [(A, [1.5, 1.0]), (-A, [0.5])], -(1.28 * A + A - 0.8 * A) / 3, [[0, -A / 3], [0]]),
    # sqrt(1.21 x 1) = 1.1: above 1.0004 for A > 0; for A < 0 it counts, and each token has half of its slope
    ("gspo", {}, [(A, [1.21, 1.0]), (-A, [1.21, 1.0])], -(1.0004 * A - 1.1 * A) / 2, [[0, 0], [1.1 * A / 4] * 2]),
    # at ratio 1: sigmoid(0) 4 / tau = 2 / tau, slope 1 whatever tau
    ("sapo", {}, [(A, [1.0]), (-A, [1.0])], -(2 * A - 2 / 1.05 * A) / 2, [[-A / 2], [A / 2]]),
    # at ratio 3 and tau 1: 4 sigmoid(2) = 3.5231884; slope 4 s (1 - s) 3 = 1.2599249
    ("sapo", {}, [(A, [3.0])], -4 * SIGMOID * A, [[-4 * SIGMOID * (1 - SIGMOID) * 3 * A]]),
    # weights 5 (bounded from 6) and 0.5 (no lower bound), a mean over two tokens; log p = -ln 2
    ("cispo", {}, [(A, [6.0]), (-A, [0.5])], -(5 * A - 0.5 * A) * HALF / 2, [[-2.5 * A], [0.25 * A]]),
    # log p of the answers: -2 ln 2 and -ln 2
    ("rloo", {}, [(1, [1.0, 1.0]), (-0.5, [1.0])], -(2 * HALF - 0.5 * HALF) / 2, [[-0.5, -0.5], [0.25]]),
    ("reinforce", {}, [(1, [1.0, 1.0]), (0, [1.0])], -HALF, [[-0.5, -0.5], [0]]),
    ("reinforce-plus-plus", {}, [(1, [1.5, 1.0]), (-2, [1.0])], -(1.2 + 1 - 2) / 3, [[0, -1 / 3], [2 / 3]]),
    # k2 of a ratio of 1.5 to the reference: ln(1.5)^2 / 2, slope ln(1.5); ratio 1.5 of A > 0 is clipped
    (
        "reinforce-plus-plus-baseline", {"kl_coef": 0.1}, [(A, [1.5])], -1.2 * A + 0.05 * math.log(1.5) ** 2,
        [[0.1 * math.log(1.5)]],
    ),
    ("gpg", {}, [(1, [1.0, 1.0]), (-1, [1.0])], -(2 * HALF - HALF) / 3, [[-1 / 3, -1 / 3], [1 / 3]]),
    ("opo", {}, [(0.75, [1.0]), (-0.25, [1.0] * 3)], 0, [[-0.375], [0.125] * 3]),
    # p = 1/2 and sampled at 1/3: moved by 1/6 > 0.15, and away for A > 0: left out. For A < 0 it comes back: counted.
    ("dppo", {}, [(A, [1.5]), (-A, [1.5])], 1.5 * A / 2, [[0], [1.5 * A / 2]]),
    # sampled at 0.4: moved by 0.1, although the ratio of 1.25 would be clipped by PPO
    ("dppo", {}, [(A, [1.25])], -1.25 * A, [[-1.25 * A]]),
    # kl of (1/3, 2/3) to (1/2, 1/2): 1/3 ln(2/3) + 2/3 ln(4/3) = 0.0566 > 0.05
    ("dppo", DELTA, [(A, [1.5])], 0, [[0]]),
    ("dppo", {**DELTA, "delta": 0.06}, [(A, [1.5])], -1.5 * A, [[-1.5 * A]]),
    ("max-rl", {}, [(3, [1.0]), (-1, [1.0, 1.0])], -(3 * HALF - 2 * HALF) / 2, [[-1.5], [0.5, 0.5]]),
    # sums over the answers' tokens, mean of the two rows
    ("remax", {}, [(0.75, [1.0, 1.0]), (-0.25, [1.0])], -(1.5 * HALF - 0.25 * HALF) / 2, [[-0.375, -0.375], [0.125]]),
    # over tokens: 1.5 is clipped to 1.2 above, 0.5 to 0.8 below
    ("ppo", {}, [(1, [1.5, 1.0]), (-1, [0.5])], -(1.2 + 1.0 - 0.8) / 3, [[0, -1 / 3], [0]]),
    # one likelier token with a negative advantage does not outweigh a batch: dual_clip = 3, or ratio_cap = 20, which keeps a
    # gradient
    ("grpo", {}, [(-1.0, [2.5])], 2.5, [[2.5]]),
    ("grpo", {}, [(-1.0, [16.0])], 3.0, [[0]]),
    ("dppo", {}, [(-1.0, [16.0])], 16.0, [[16.0]]),
    ("dppo", {}, [(-1.0, [64.0])], 20.0, [[20.0]]),
    ("m2po", {}, [(-1.0, [64.0])], 20.0, [[20.0]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "samples", "want", "slopes"), LOSSES)
def test_loss_and_gradient(name, options, samples, want, slopes):
    loss, gradient, _ = learnt(build(name, options), rows(*samples))
    assert loss == exactly(want)
    assert [row[1:] for row in gradient] == [exactly(row) for row in slopes]


def test_every_algorithm_is_worked():
    assert {name for name, *_ in LOSSES} | {"gigpo", "gdpo"} == set(NAMES)


def test_the_correction_weighs_by_start_over_behaviour():
    sample = rows((A, [1.0]))
    sample[0]["rollout"][1] = HALF - math.log(1.6)  # w = 1.6
    truncate = {"correction": "truncate"}
    assert learnt(build("grpo", truncate), sample)[0] == exactly(-1.6 * A)
    sample[0]["rollout"][1] = HALF - math.log(3)  # w = 3
    assert learnt(build("grpo", truncate), sample)[0] == exactly(-2 * A)
    assert learnt(build("grpo", {"correction": "mask"}), sample)[0] == exactly(0)
    assert learnt(build("grpo", {"correction": "reject"}), sample)[0] == exactly(0)
    assert learnt(build("grpo", {"correction": "reject", "correction_cap": 4}), sample)[0] == exactly(-A)
    assert learnt(build("grpo", {"correction": "none"}), sample)[0] == exactly(-A)
    assert learnt(build("grpo"), sample)[0] == exactly(-1.2 * A)


@pytest.mark.parametrize("correction", ["behaviour", "truncate", "mask", "reject", "none"])
@pytest.mark.parametrize("name", ["grpo", "sapo", "dppo", "rloo"])
def test_the_unbiased_divergence_is_weighed_by_the_policy_over_the_policy_that_sampled(name, correction):
    if correction == "behaviour" and name == "rloo":
        return  # it has no ratio
    sample = rows((0.0, [1.0]))
    for column, probability in (("log_probs", 0.3), ("old", 0.25), ("rollout", 0.1), ("ref", 0.2)):
        sample[0][column][1] = math.log(probability)
    k3 = 2 / 3 + math.log(1.5) - 1
    options = {"kl_coef": 1.0, "kl_estimator": "unbiased", "correction": correction, "aggregation": "token"}
    algorithm = build(name, options)
    assert "rollout_log_probs" in {column.name for column in algorithm.columns()}
    loss, slopes, _ = learnt(algorithm, sample)
    assert loss == exactly(3 * k3) and round(loss, 4) == 0.2164
    # d/dx of exp(x - a) (exp(q - x) - (q - x) - 1) is exp(x - a) (x - q): the divergence's own gradient on average
    assert slopes[0][1] == pytest.approx(3 * math.log(1.5), abs=1e-9)


def test_reinforce_plus_plus_pays_for_the_divergence_from_each_token_on():
    # log(p / p_ref) = 1 at both tokens, beta 0.1: the first has 1 - 0.2 to go, the second 1 - 0.1; the other sample 0
    algorithm = build("reinforce-plus-plus", {"reward_kl_coef": 0.1})
    groups = [group(1, 0, lengths=[2, 1])]
    groups[0][0]["rows"][0]["ref"] = [0, -1, -1]
    values = [0.8, 0.9, 0.0]
    mean = sum(values) / 3
    std = math.sqrt(sum((x - mean) ** 2 for x in values) / 2) + 1e-6
    (first, second), (other,) = [member[0][1:] for member in credited(algorithm, groups)[0]]
    assert [first, second, other] == exactly([(x - mean) / std for x in values])


def test_gdpo():
    # right (1, 0, 0): mean 1/3, std 1/sqrt(3): (2, -1, -1)/sqrt(3); form (0, 1, 0): (-1, 2, -1)/sqrt(3).
    # their sum (1, 1, -2)/sqrt(3): mean 0, variance (1/3 + 1/3 + 4/3) / 2 = 1. GRPO would see 1, 1, 0 as well.
    parts = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}, {"right": 0.0, "form": 0.0}]
    got = credited(build("gdpo"), [group(1, 1, 0, parts=parts)])
    assert got == [pytest.approx([1 / math.sqrt(3), 1 / math.sqrt(3), -2 / math.sqrt(3)], abs=1e-5)]
    # with the form at a quarter: (2 - 1/4, -1 + 1/2, -1 - 1/4)/sqrt(3) before the batch's std
    values = [1.75, -0.5, -1.25]
    std = math.sqrt(sum(x * x for x in values) / 2)
    got = credited(build("gdpo", {"weights": {"form": 0.25}}), [group(1, 1, 0, parts=parts)])
    assert got == [pytest.approx([x / std for x in values], abs=1e-5)]


def parts_of(**parts):
    """A part's values for each sample -> each sample's parts."""
    return [dict(zip(parts, values)) for values in zip(*parts.values())]


@pytest.mark.parametrize(
    ("weights", "parts", "options", "want"),
    [
        ({"exact": 1, "long": -1}, {"exact": [1, 1], "long": [1, 0]}, {}, [-1, 1]),  # a penalty is a penalty
        ({"exact": 1, "form": 0}, {"exact": [1, 1], "form": [1, 0]}, {}, [0, 0]),  # weight 0: only logged
        ({"exact": 1, "form": 0}, {"exact": [1, 1], "form": [1, 0]}, {"form": 1.0}, [1, -1]),
        ({"exact": 1}, {"exact": [1, 0], "exact/words": [100, 900]}, {}, [1, -1]),  # a score's parts are logged
        ({"exact": 1}, {"exact": [1, 0], "environment": [0, 5]}, {}, [1, -1]),
        ({"exact": 1}, {"exact": [1, 1], "environment": [0, 5]}, {"environment": 1.0}, [-1, 1]),
        ({"exact": 1}, {"exact": [1, 1], "exact/words": [100, 900]}, {"exact/words": -1.0}, [1, -1]),
        ({"exact": 1, "code": 1}, {"exact": [1, 0]}, {"code": 2.0}, [1, -1]),  # no task of this batch has code
        ({}, {"environment": [1, 0]}, {}, [1, -1]),  # without [[rewards]]: the sample's reward
        ({"right": 1, "form": 1}, {"right": [1, 0], "form": [0, 1]}, {}, [0, 0]),
        ({"right": 1, "form": 1}, {"right": [1, 0], "form": [100, 900]}, {}, [0, 0]),  # cancels but for the epsilon
        ({"right": 1, "form": 1}, {"right": [1e-3, 0], "form": [100, 900]}, {}, [0, 0]),
        ({"right": 1}, {"right": [0.1 + 0.2, 0.3]}, {}, [0, 0]),  # differs by rounding
    ],
)
def test_gdpo_learns_from_the_rewards_that_are_named(weights, parts, options, want):
    first = next(iter(parts.values()))
    got = credited(build("gdpo", {"weights": options}), [group(*first, parts=parts_of(**parts))], weights=weights)
    scale = 1 / math.sqrt(2)
    assert got == [pytest.approx([x * scale for x in want], abs=1e-4)]
    assert [x == 0 for x in got[0]] == [x == 0 for x in want], "rounding is no advantage"


def test_gdpo_and_max_rl_refuse_a_divergence_in_the_reward():
    for name in ("gdpo", "max-rl"):
        with pytest.raises(ValueError, match=r"reward_kl_coef: got 0.1; .*use kl_coef"):
            build(name, {"reward_kl_coef": 0.1})


def test_max_rl_refuses_negative_rewards():
    with pytest.raises(ValueError, match=r"rewards: got -1; .*give rewards of 0 or more"):
        credited(build("max-rl"), [group(1, -1)])


def test_gigpo():
    # Two samples of two turns each, gamma = 1/2: rewards (0, 1) and (0, 0). Both begin in state 7: returns 1/2 and 0, apart by
    # 1/2: mean 1/4, std 1/sqrt(8). Only the first comes to state 8, only the second to 9: no comparison there.
    won, lost = group(1, 0, lengths=[3, 2])
    won["rows"][0]["turns"], won["turns"] = [-1, 0, 0, 1], [{"state": 7, "reward": 0.0}, {"state": 8, "reward": 1.0}]
    lost["rows"][0]["turns"], lost["turns"] = [-1, 0, 1], [{"state": 7, "reward": 0.0}, {"state": 9, "reward": 0.0}]
    step = 0.25 / (math.sqrt(0.125) + 1e-6)
    first, second = [0, A + step, A + step, A], [0, -A - step, -A]
    assert credited(build("gigpo", {"gamma": 0.5}), [[won, lost]]) == [[[exactly(first)], [exactly(second)]]]
    # Where the second comes to 8 as well, its turn there earned 0 and the first one's 1: GRPO's A.
    lost["turns"][1]["state"] = 8
    first[3], second[2] = 2 * A, -2 * A
    assert credited(build("gigpo", {"gamma": 0.5}), [[won, lost]]) == [[[exactly(first)], [exactly(second)]]]
    # Less the mean only, and half of it: 1/2 + 1/2 (1/2 - 1/4), 1/2 + 1/2 (1 - 1/2).
    algorithm = build("gigpo", {"gamma": 0.5, "normalise": "none", "step_weight": 0.5})
    want = [[[exactly([0, 0.625, 0.625, 0.75])], [exactly([0, -0.625, -0.75])]]]
    assert credited(algorithm, [[won, lost]]) == want


def test_m2po():
    # Logs of ratios 0.1 and 0.5 move away where A > 0, -0.3 and, backwards, 0.4 where A < 0: squares 0.01, 0.25 and 0.09. Of
    # these the mean is 0.1167, without the largest 0.05, without two 0.01: at a bound of 0.04 only the first is left of
    # them; the fourth moves back and stays.
    first, second = math.exp(0.1), math.exp(0.5)
    third, fourth = math.exp(-0.3), math.exp(0.4)
    sampled = rows((1.0, [first, second]), (-1.0, [third, fourth]))
    for row in sampled:
        row["old"] = list(row["log_probs"])  # the step starts where the policy is
    loss, slopes, _ = learnt(build("m2po"), sampled)
    assert loss == exactly(-(first - fourth) / 4)
    assert [row[1:] for row in slopes] == [exactly([-first / 4, 0]), exactly([0, fourth / 4])]
    assert learnt(build("m2po", {"second_moment": 0.06}), sampled)[0] == exactly(-(first - third - fourth) / 4)


def test_remax_compares_with_the_greedy_answer():
    members = group(1, 0)
    for greedy, want in ((0.25, [0.75, -0.25]), (None, [0, 0])):  # None: it has no verdict, so nothing to compare with
        for member in members:
            member["greedy"] = greedy
        assert credited(build("remax"), [members]) == [exactly(want)]


def test_ppo():
    # Three tokens, a reward of 1 at the last, values 0.5, 0.25, 0.75; gamma = 1, lambda = 1/2. The errors of the values are
    # 0.25 - 0.5, 0.75 - 0.25 and 1 - 0.75, so A = -0.25 + 0.3125, 0.5 + 0.125 and 0.25; the returns are A + V.
    (sample,) = group(1, lengths=[3])
    sample["rows"][0]["values"] = [9.0, 0.5, 0.25, 0.75]
    ours = build("ppo", {"lam": 0.5, "normalise": False})
    assert credited(ours, [[sample]]) == [[[exactly([0, 0.0625, 0.625, 0.25])]]]
    assert credited(ours, [[sample]], returns=True) == [[[exactly([0, 0.5625, 0.875, 1.0])]]]
    # The critic: returns of 1, an old value of 0. At 0.1 it counts as it is, 0.9^2; at 0.5 it has gone beyond 0.2: 0.8^2,
    # without a gradient; at -0.5 going back is what it should: 1.5^2.
    columns = {
        "values": [0.0] * 4,
        "returns": [0.0, 1.0, 1.0, 1.0],
        "mask": [0, 1, 1, 1],
        "value": [0.0, 0.1, 0.5, -0.5],
    }
    loss, slopes, metrics = fitted(build("ppo"), [{**columns, "id": RowId(0, 0, 0, 0)}])
    assert loss == exactly((0.81 + 0.64 + 2.25) / 6)
    assert slopes == [exactly([0, -0.9 / 3, 0, -1.5 / 3])]
    assert metrics == {"critic/clip_fraction": (1.0, 3.0)}


@pytest.mark.parametrize("apart", [3e-3, -3e-3])
def test_gspo_keeps_the_gradient_of_sequences_that_the_engine_rounded(apart):
    sampled = rows((1.0, [1.0, 1.0]), (-1.0, [1.0, 1.0]))
    for row in sampled:
        row["rollout"] = [0.0] + [x + apart for x in row["rollout"][1:]]
    _, slopes, metrics = learnt(build("gspo"), sampled)
    assert all(slope[1:] == pytest.approx([-sign / 4] * 2, rel=0.01) for slope, sign in zip(slopes, (1, -1)))
    assert metrics["policy/sequences_clipped_positive"] == metrics["policy/sequences_clipped_negative"] == (0.0, 1.0)
    _, slopes, metrics = learnt(build("gspo", {"correction": "behaviour"}), sampled)
    gone = (0.0, 1.0), (1.0, 1.0)
    assert metrics["policy/sequences_clipped_positive"] == gone[apart < 0]
    assert metrics["policy/sequences_clipped_negative"] == gone[apart > 0]
    assert [any(slope) for slope in slopes] == [apart > 0, apart < 0]
