# SPDX-License-Identifier: Apache-2.0
"""The suite for one algorithm of each shape: of the family's base, with all that it offers, with a constant factor, with
statistics of the batch and of tokens. Every algorithm, and what its numbers are, is in `tests/golden`."""

from relax_core.testing.algorithm import AlgorithmSuite


class TestGRPO(AlgorithmSuite):
    component = "grpo"


class TestGRPOWithEverything(AlgorithmSuite):
    component = "grpo"
    options = {"kl_coef": 0.04, "kl_estimator": "unbiased", "entropy_coef": 0.01, "aggregation": "token",
               "clip_high": 0.28, "correction": "mask", "correction_floor": 0.5}  # fmt: skip


class TestCISPO(AlgorithmSuite):
    component = "cispo"
    stops_gradients = True  # the weight is a constant of the update


class TestReinforcePlusPlus(AlgorithmSuite):
    component = "reinforce-plus-plus"
    options = {"reward_kl_coef": 0.01}


class TestGDPO(AlgorithmSuite):
    component = "gdpo"
