# SPDX-License-Identifier: Apache-2.0
"""The Megatron trainer conforms in every layout: data, tensor, sequence and pipeline parallel on several processes."""

import pytest

from relax_core.testing.moe import tiny_moe
from relax_core.testing.trainer import FurtherConfiguration, TrainerSuite, tiny_model
from tests.megatron_on_cpu.trainer import MegatronOnCpu, PatchedRanks

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once


class OnCpu(TrainerSuite):
    component = "megatron"
    test_the_same_input_gives_the_same_result = None  # continuing from a checkpoint shows it, without two more servers
    test_every_process_gives_the_same_result = None

    @classmethod
    def make(cls):
        return PatchedRanks(MegatronOnCpu, cls.options, cls.ranks)


class TestMegatron(OnCpu):
    pass


@pytest.mark.faults  # test_layouts.py compares the same layouts with the torch trainer
class Further(OnCpu, FurtherConfiguration):
    pass


class TestDataParallel(Further):
    ranks = 2


class Split(Further):
    """Ranks that compute the same rows."""

    ranks = 2
    test_the_plan_holds_every_row_once_on_an_instance_not_started = None

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return tiny_model(tmp_path_factory.mktemp("model"), key_value_heads=2, dtype=self.dtype)


class TestTensorAndSequenceParallel(Split):
    options = {"tensor_parallel": 2, "sequence_parallel": True}


class TestPipelineParallel(Split):
    options = {"pipeline_parallel": 2}


class TestDataAndPipelineParallel(Split):
    """Two pipelines with different rows: ranks 0 and 2, and ranks 1 and 3."""

    options = {"pipeline_parallel": 2}
    ranks = 4


class TestExpertParallel(Further):
    options = {"expert_parallel": 2}
    ranks = 2

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return tiny_moe(str(tmp_path_factory.mktemp("model")), 0, pad_token_id=None)


class TestInBfloat16(Further):
    dtype, tolerance, rounding = "bfloat16", 0.05, 0.15
