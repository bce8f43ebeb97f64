# SPDX-License-Identifier: Apache-2.0
"""The suite for each way to learn from a teacher. What the numbers are is in `tests/golden/test_distillation.py`."""

import pytest

from relax_core.testing.algorithm import AlgorithmSuite

pytestmark = pytest.mark.one_process("exercises")


class TestAdvantages(AlgorithmSuite):
    component = "distillation"


class AsLoss(AlgorithmSuite):
    """Every row has a gradient, whatever it earned."""

    test_rows_without_advantage_have_no_gradient_if_declared = None


class TestJSDOfTheStudentsLikeliestTokens(AsLoss):
    component = "distillation"
    options = {"mode": "loss", "tokens": "student-top-k", "divergence": "jsd", "k": 2, "rest": "renormalise"}


class TestForwardOfTheTeachersLikeliestTokens(AsLoss):
    component = "distillation"
    options = {"mode": "loss", "tokens": "teacher-top-k", "divergence": "forward", "k": 2, "reward_coef": 0.5}


class TestLossOfSampledTokens(AsLoss):
    component = "distillation"
    options = {"mode": "loss", "divergence": "forward", "kl_coef": 0.1}
