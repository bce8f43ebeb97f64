# SPDX-License-Identifier: Apache-2.0
"""The suite for one algorithm of each shape: of the family's base, with all that it offers, with a constant factor, with
statistics of the batch and of tokens. Every algorithm, and what its numbers are, is in `tests/golden`.
"""

import pytest

from relax_core.testing.algorithm import AlgorithmSuite

pytestmark = pytest.mark.one_process("exercises")


class TestGRPO(AlgorithmSuite):
    component = "grpo"


class TestGRPOWithEverything(AlgorithmSuite):
    component = "grpo"
    options = {"kl_coef": 0.04, "kl_estimator": "unbiased", "entropy_coef": 0.01, "aggregation": "token",
               "clip_high": 0.28, "correction": "mask", "correction_floor": 0.5}  # fmt: skip
    test_rows_without_advantage_have_no_gradient_if_declared = None  # divergence and entropy have one


class TestCISPO(AlgorithmSuite):
    component = "cispo"
    stops_gradients = True  # the weight is a constant of the update
    test_gradients_match_finite_differences = None


class TestReinforcePlusPlus(AlgorithmSuite):
    component = "reinforce-plus-plus"
    options = {"reward_kl_coef": 0.01}
    test_groups_do_not_touch_each_other = None  # its statistics are over the batch


class TestPPO(AlgorithmSuite):
    component = "ppo"
    test_groups_do_not_touch_each_other = None  # its statistics are over the batch


class TestM2PO(AlgorithmSuite):
    component = "m2po"


class TestReMax(AlgorithmSuite):
    component = "remax"


class TestGiGPO(AlgorithmSuite):
    component = "gigpo"
