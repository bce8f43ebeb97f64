# SPDX-License-Identifier: Apache-2.0
"""GRPO conforms, in the paper's setting and with every deviation it offers."""

from relax_core.testing.algorithm import AlgorithmSuite


class TestGRPO(AlgorithmSuite):
    component = "grpo"


class TestGRPOWithEverything(AlgorithmSuite):
    component = "grpo"
    options = {"kl_coef": 0.04, "entropy_coef": 0.01, "aggregation": "token", "clip_high": 0.28}
    test_rows_without_advantage_have_no_gradient_where_it_says_so = None  # KL and entropy give every row one


class TestGRPOOfFixedLength(AlgorithmSuite):
    component = "grpo"
    options = {"aggregation": "fixed", "fixed_length": 32}
