# SPDX-License-Identifier: Apache-2.0
"""The torch trainer conforms: alone, on several ranks, in every format, and where only parts of the model are trained.

`test_ranks.py` compares copies on two ranks with one rank; `test_recomputing.py` compares recomputed blocks bit for bit.
"""

import pytest

from relax_core.testing.trainer import FurtherConfiguration, TrainerSuite


class TestTorch(TrainerSuite):
    component = "torch"


class Further(FurtherConfiguration):
    component = "torch"


class TestTorchSharded(Further):
    options = {"sharding": "fsdp"}
    ranks = 2


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
