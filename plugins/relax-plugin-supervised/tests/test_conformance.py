# SPDX-License-Identifier: Apache-2.0
"""The suite for each algorithm; what its numbers are is in `tests/golden/test_supervised.py`."""

import pytest

from relax_core.testing.algorithm import AlgorithmSuite

pytestmark = pytest.mark.one_process("exercises")


class GivenRows(AlgorithmSuite):
    """Nothing is credited here, so nothing is left out for want of credit."""

    test_advantages_have_their_shape = None
    test_groups_do_not_touch_each_other = None
    test_rows_without_advantage_have_no_gradient_if_declared = None


class TestSFT(GivenRows):
    component = "sft"


class TestDPO(GivenRows):
    component = "dpo"


class TestRewardModel(GivenRows):
    component = "reward-model"
    options = {"center_coef": 0.01}
