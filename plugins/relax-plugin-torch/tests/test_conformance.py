# SPDX-License-Identifier: Apache-2.0
"""The torch trainer conforms: alone, on several ranks, in every format, and where only parts of the model are trained.

`test_ranks.py` compares copies and shares on two ranks with one rank: micro-batches, chunks, late counts, rows without
gradient and scores. `test_checkpoint.py` continues ranks bit for bit, and `test_recomputing.py` compares recomputed blocks.
"""

import pytest

from relax_core.testing.trainer import FurtherConfiguration, TrainerSuite

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once


@pytest.mark.one_process("exercises")
class TestTorch(TrainerSuite):
    component = "torch"


class Further(FurtherConfiguration):
    component = "torch"


class TestTorchSharded(Further):
    """Aborted and failed updates, masked values, and the weights that leave the ranks."""

    options = {"sharding": "fsdp"}
    ranks = 2
    test_the_gradient_does_not_depend_on_micro_batches = None
    test_chunks_add_up = None
    test_a_late_count_gives_the_same_gradient = None
    test_leaving_out_rows_without_gradient_changes_nothing = None
    test_forward_keeps_the_order_of_the_rows = None
    test_no_token_sees_what_follows_it = None
    test_continuing_from_a_checkpoint_is_bit_exact = None
    test_a_missing_checkpoint_is_refused = None


class TestTorchInBfloat16(Further):
    dtype, tolerance, rounding = "bfloat16", 0.05, 0.15


@pytest.mark.faults
class TestTorchInFloat16(Further):
    dtype, tolerance, rounding = "float16", 0.01, 0.02


@pytest.mark.faults
class TestTorchTensorParallel(Further):
    """Two ranks, one tensor-parallel group: the plan gives both the same rows."""

    options = {"tensor_parallel": 2}
    ranks = 2
    test_the_plan_holds_every_row_once_on_an_instance_not_started = None

    @pytest.fixture(scope="class")
    def folder(self, divisible):
        return divisible


class OfParts(Further):
    """Adapters, or what is not frozen, are trained."""

    part = {"lora": {"rank": 4, "alpha": 8.0}}

    @classmethod
    def start(cls, trainer, folder, **changes):
        return super().start(trainer, folder, model={"path": folder, **cls.part}, **changes)


class TestAdapters(OfParts):
    pass


@pytest.mark.faults
class TestAdaptersAndFrozenPartsSharded(OfParts):
    part = {"lora": {"rank": 4, "alpha": 8.0, "dora": True}, "freeze": ["layers.0.mlp"]}
    options = {"sharding": "fsdp"}
    ranks = 2
