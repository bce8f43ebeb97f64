# SPDX-License-Identifier: Apache-2.0
"""From the TOML to the loss: every option of every algorithm is set in a configuration, and loss and advantages become
those that the plain loops of `tests/golden/reference` give with the option, and differ from those without.

The options are those of the schema. A new one fails here until `CASES` or a table of one algorithm has a value for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import RelaxError
from tests.golden import bench, test_critic as critic, test_distillation as distillation, test_supervised as supervised
from tests.golden.reference import plain, ppo
from tests.wiring.options import built, options

Options = Mapping[str, Any]
SEEDS = range(3)
FIXED = {"aggregation": "fixed", "fixed_length": 11}
CASES: dict[str, tuple[Any, Options]] = {
    "aggregation": ("token", {}),
    "fixed_length": (7, FIXED),
    "correction": ("none", {}),
    "correction_level": ("sequence", {"correction": "truncate"}),
    "correction_cap": (1.2, {"correction": "truncate"}),
    "correction_floor": (0.8, {"correction": "mask"}),
    "sequence_mask_delta": (0.05, {}),
    "kl_coef": (0.1, {}),
    "kl_estimator": ("k1", {"kl_coef": 0.1}),
    "reward_kl_coef": (0.1, {}),
    "entropy_coef": (0.01, {}),
    "clip_low": (0.1, {}),
    "clip_high": (0.05, {}),
    "dual_clip": (1.05, {}),
}
"""Option of several algorithms -> a value, and the options beside it: also those of the loss without the value."""
OF_ONE: dict[str, dict[str, tuple[Any, Options]]] = {
    "dapo": {
        "overlong_length": (5, {"overlong_length": 6, "overlong_buffer": 3}),
        "overlong_buffer": (2, {"overlong_length": 5, "overlong_buffer": 4}),
    },
    "distillation": {
        "mode": ("loss", {"correction": "truncate"}),
        "tokens": ("student-top-k", {"mode": "loss"}),
        "divergence": ("forward", {}),
        "beta": (0.2, {"divergence": "jsd"}),
        "rest": ("renormalise", {"mode": "loss", "tokens": "student-top-k"}),
        "coef": (0.5, {"reward_coef": 0.25}),
        "reward_coef": (0.5, {}),
        "discount": (0.9, {}),
        "reward_kl_coef": (0.1, {"reward_coef": 0.5}),
    },
    "dpo": {
        "beta": (0.7, {}),
        "loss_type": ("ipo", {}),
        "label_smoothing": (0.2, {}),
    },
    "dppo": {"divergence": ("kl", {"delta": 0.05}), "delta": (0.02, {}), "ratio_cap": (1.1, {})},
    "gdpo": {"weights": ({"form": 0.25}, {})},
    "gigpo": {"gamma": (0.7, {}), "step_weight": (0.5, {}), "normalise": ("none", {})},
    "grpo": {"normalise": ("none", {})},
    "m2po": {"second_moment": (0.2, {}), "ratio_cap": (1.1, {})},
    "ppo": {"gamma": (0.9, {}), "lam": (0.7, {}), "normalise": (False, {}), "value_clip": (0.05, {})},
    "reinforce": {"baseline": (0.5, {}), "sequence_mask_delta": (0.05, {"baseline": 0.5})},
    "reinforce-plus-plus": {"gamma": (0.9, {})},
    "reward-model": {"margin": (0.3, {}), "margins": (True, {}), "center_coef": (0.05, {})},
    "sapo": {"tau_positive": (2.0, {}), "tau_negative": (2.0, {})},
}
"""Algorithm -> its own options, and common options that need others beside them."""
OTHERWISE = {"aggregation": "sequence", "kl_estimator": "k3"}
"""Values of common options whose value of `CASES` is an algorithm's default."""
NO_EFFECT = {
    ("gdpo", "reward_kl_coef"),
    ("m2po", "correction"),
    ("m2po", "correction_level"),
    ("m2po", "correction_cap"),
    ("m2po", "correction_floor"),
    ("max-rl", "reward_kl_coef"),
}
"""Common options that an algorithm refuses."""
DEFAULTS: Options = {
    "aggregation": "token", "fixed_length": 0, "correction": "behaviour", "correction_level": "token",
    "correction_cap": 2.0, "correction_floor": 0.0, "sequence_mask_delta": 0.0, "kl_coef": 0.0, "kl_estimator": "k3",
    "reward_kl_coef": 0.0, "entropy_coef": 0.0, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "advantages": "",
}  # fmt: skip
"""Defaults of options of several algorithms."""
SUMMED = {"aggregation": "sum", "correction": "truncate"}
"""Defaults of the algorithms without a ratio: their loss is the sum of a sequence's tokens."""
DEFAULTS_OF_ONE: Mapping[str, Options] = {
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "dapo": {"clip_high": 0.28, "overlong_length": 0, "overlong_buffer": 0},
    "distillation": {
        "mode": "advantage", "tokens": "sampled", "divergence": "reverse", "beta": 0.5, "k": 16, "rest": "bucket",
        "coef": 1.0, "reward_coef": 0.0, "discount": 0.0,
    },
    "dpo": {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0},
    "dppo": {"divergence": "tv", "delta": 0.15, "ratio_cap": 20.0},
    "dr-grpo": {"aggregation": "sum"},
    "gdpo": {"aggregation": "trajectory", "weights": {}},
    "gigpo": {"gamma": 0.95, "step_weight": 1.0, "normalise": "std"},
    "gpg": {"correction": "truncate"},
    "grpo": {"aggregation": "trajectory", "normalise": "std", "credit_by": "sample"},
    "gspo": {
        "aggregation": "trajectory", "correction": "truncate", "correction_level": "geometric",
        "clip_low": 3e-4, "clip_high": 4e-4,
    },
    "m2po": {"second_moment": 0.04, "ratio_cap": 20.0},
    "max-rl": SUMMED,
    "opo": SUMMED,
    "ppo": {"value_clip": 0.2, "gamma": 1.0, "lam": 1.0, "normalise": True},
    "reinforce": {**SUMMED, "baseline": 0.0},
    "reinforce-plus-plus": {"gamma": 1.0},
    "reinforce-plus-plus-baseline": {"kl_estimator": "k2"},
    "remax": SUMMED,
    "reward-model": {"margin": 0.0, "margins": False, "center_coef": 0.0},
    "rloo": SUMMED,
    "sapo": {"aggregation": "trajectory", "tau_positive": 1.0, "tau_negative": 1.05},
    "sft": {},
}  # fmt: skip
"""Algorithm -> defaults of its own options, and defaults that differ from `DEFAULTS`: those of its paper."""
ELSEWHERE = {
    ("grpo", "credit_by"): "tests/unit/learn/test_turns.py",
    ("distillation", "k"): "test_k_of_a_distillation_is_the_width_of_its_columns",
}


def _case(name: str, option: str) -> tuple[Options, Options]:
    """Return the options without the one that is set, and with it."""
    value, beside = OF_ONE.get(name, {}).get(option) or CASES[option]
    default = built("algorithm", name, {}).options.model_dump()[option]
    if value == default:
        value = OTHERWISE[option]
    return beside, {**beside, option: value}


def _sampled(algorithm: Any, name: str) -> tuple[list[float], list[float]]:
    """Return advantages and loss of an algorithm that samples, and those of its reference."""
    chosen, reference, ours, theirs = algorithm.options.model_dump(), bench.reference(name), [], []
    drawn, learnt = bench.draw_groups, bench.learnt
    if name == "distillation":
        drawn, learnt = distillation.drawn, distillation.learnt
    for seed in SEEDS:
        groups = drawn(seed)
        want = reference.advantages(groups, chosen)
        rows = bench.rows_of(groups, want)
        credited = bench.of_tokens(groups, bench.credited(algorithm, groups))
        ours += [*bench.flat(credited), learnt(algorithm, rows)[0]]
        theirs += [*bench.flat(bench.of_tokens(groups, want)), plain.constant(reference.loss(rows, chosen))]
    return ours, theirs


def _critic(algorithm: Any) -> tuple[list[float], list[float]]:
    ours, theirs = [], []
    for seed in SEEDS:
        _, rows, _ = critic.prepared({}, seed)
        ours.append(critic.fitted(algorithm, rows)[0])
        theirs.append(plain.constant(ppo.value_loss(rows, algorithm.options.model_dump())))
    return ours, theirs


def _distilled(algorithm: Any) -> tuple[list[float], list[float]]:
    chosen, reference, ours, theirs = algorithm.options.model_dump(), distillation.reference, [], []
    for seed in SEEDS:
        groups = distillation.drawn(seed)
        want = reference.advantages(groups, chosen)
        rows = bench.rows_of(groups, want)
        ours += [
            *bench.flat(bench.of_tokens(groups, bench.credited(algorithm, groups))),
            distillation.learnt(algorithm, rows)[0],
        ]
        theirs += [*bench.flat(bench.of_tokens(groups, want)), plain.constant(reference.loss(rows, chosen))]
    return ours, theirs


def _supervised(algorithm: Any, name: str) -> tuple[list[float], list[float]]:
    ours, theirs = [], []
    for seed in SEEDS:
        rows = supervised.draw(name, seed)
        ours.append(supervised.learnt(algorithm, rows)[0])
        theirs.append(supervised.theirs(name, algorithm.options.model_dump(), rows)[0])
    return ours, theirs


def _numbers(name: str, given: Options) -> tuple[list[float], list[float]]:
    """Return advantages and losses of the algorithm of a configuration, and those of its reference."""
    algorithm = built("algorithm", name, given)
    if name in ("sft", "dpo", "reward-model"):
        return _supervised(algorithm, name)
    ours, theirs = _sampled(algorithm, name)
    if name == "ppo":
        values, wanted = _critic(algorithm)
        ours, theirs = ours + values, theirs + wanted
    return ours, theirs


@cache
def _without(name: str, given: tuple[tuple[str, Any], ...]) -> list[float]:
    return _numbers(name, dict(given))[0]


SET = [pair for pair in options("algorithm") if pair not in NO_EFFECT | ELSEWHERE.keys() and pair[1] != "advantages"]


@pytest.mark.parametrize(("name", "option"), SET, ids=[".".join(pair) for pair in SET])
def test_an_option_changes_the_loss_or_the_advantages_as_the_reference_says(name: str, option: str) -> None:
    own = OF_ONE.get(name, {})
    assert option in own or option in CASES, f"algorithm {name} has a new option {option}: give it a value in OF_ONE"
    before, after = _case(name, option)
    ours, theirs = _numbers(name, after)
    assert ours == pytest.approx(theirs, abs=1e-9)
    assert ours != pytest.approx(_without(name, tuple(before.items())), abs=1e-9), f"{after} changes nothing"


def test_tables_name_options_that_there_are() -> None:
    known = set(options("algorithm"))
    assert {(name, option) for name, own in OF_ONE.items() for option in own} | NO_EFFECT | ELSEWHERE.keys() <= known
    assert CASES.keys() <= {option for _, option in known}


@pytest.mark.parametrize(("name", "option"), sorted(NO_EFFECT))
def test_an_option_without_effect_is_refused(name: str, option: str) -> None:
    with pytest.raises(RelaxError, match=option):
        built("algorithm", name, {option: CASES[option][0]})


def test_without_options_an_algorithm_is_that_of_its_paper() -> None:
    """The references of `tests/golden` read the defaults of the algorithms, so they cannot see another default."""
    names = {name for name, _ in options("algorithm")} | {"sft"}
    found = {name: built("algorithm", name, {}).options.model_dump() for name in names}
    assert found == {
        name: {option: {**DEFAULTS, **DEFAULTS_OF_ONE[name]}[option] for option in found[name]} for name in names
    }
    assert all(own.keys() <= found[name].keys() for name, own in DEFAULTS_OF_ONE.items())


def test_k_of_a_distillation_is_the_width_of_its_columns() -> None:
    made = built("algorithm", "distillation", {"mode": "loss", "tokens": "teacher-top-k", "k": 3})
    assert {column.shape for column in made.columns() if column.name.startswith("teacher_top_k")} == {(3,)}


OWN = [name for name, option in options("algorithm") if option == "advantages"]


@pytest.mark.parametrize("name", OWN)
def test_advantages_of_a_users_function_are_those_of_the_function(name: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def own(groups):\n    return groups.rewards * 0 + 3.5\n")
    given = {"advantages": f"{file}:own"}
    if name in ("ppo", "reinforce-plus-plus"):  # with advantages of their own, which read more than rewards
        with pytest.raises(RelaxError, match=r"algorithm\.advantages"):
            built("algorithm", name, given)
        return
    draw = distillation.drawn if name == "distillation" else bench.draw_groups
    credited = bench.credited(built("algorithm", name, given), draw(0))
    assert set(bench.flat(credited)) == {3.5}
