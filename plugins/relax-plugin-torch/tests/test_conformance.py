# SPDX-License-Identifier: Apache-2.0
"""The torch trainer conforms, alone and on several ranks."""

import pytest

from relax_core.testing.trainer import FurtherConfiguration, TrainerSuite, tiny_model


class TestTorch(TrainerSuite):
    component = "torch"


class Ranked(FurtherConfiguration):
    component = "torch"
    ranks = 2


@pytest.mark.faults
class TestTorchOnTwoRanks(Ranked):
    options = {"sharding": "none"}


class TestTorchSharded(Ranked):
    options = {"sharding": "fsdp"}


class TestTorchInBfloat16(FurtherConfiguration):
    component = "torch"
    dtype, tolerance, rounding = "bfloat16", 0.05, 0.15


@pytest.mark.faults
class TestTorchInFloat16(FurtherConfiguration):
    component = "torch"
    dtype, tolerance, rounding = "float16", 0.01, 0.02


@pytest.mark.faults  # test_recomputing.py compares the numbers of both ways
class TestTorchRecomputing(FurtherConfiguration):
    component = "torch"
    options = {"activation_checkpointing": True}


class TestTorchTensorParallel(Ranked):
    """Two ranks, one tensor-parallel group: the plan gives both the same rows."""

    options = {"tensor_parallel": 2}
    tensor_parallel = 2
    test_the_plan_holds_every_row_once_on_an_instance_not_started = None

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        """With key-value heads for both."""
        return tiny_model(tmp_path_factory.mktemp("model"), key_value_heads=2)
