# SPDX-License-Identifier: Apache-2.0
"""The suite for each algorithm; what its numbers are is in `tests/golden/test_supervised.py`."""

from relax_core.testing.algorithm import AlgorithmSuite


class TestSFT(AlgorithmSuite):
    component = "sft"


class TestDPO(AlgorithmSuite):
    component = "dpo"


class TestRewardModel(AlgorithmSuite):
    component = "reward-model"
    options = {"center_coef": 0.01}
