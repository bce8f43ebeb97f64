# SPDX-License-Identifier: Apache-2.0
"""The torch trainer conforms where only a part of the model is trained: adapters, or what is not frozen."""

from typing import Any, ClassVar

from relax_core.testing.trainer import TrainerSuite


class OfParts(TrainerSuite):
    """That processes agree is asked where all of the model is trained: here it would start six more a class."""

    component = "torch"
    part: ClassVar[dict[str, Any]] = {}
    test_the_same_input_gives_the_same_result = None
    test_every_process_gives_the_same_result = None

    @classmethod
    def start(cls, trainer, folder, **changes):
        return super().start(trainer, folder, model={"path": folder, **cls.part}, **changes)


class TestAdapters(OfParts):
    part = {"lora": {"rank": 4, "alpha": 8.0}}


class TestFrozen(OfParts):
    part = {"freeze": ["embed_tokens", "layers.0"]}


class TestAdaptersSharded(OfParts):
    part = {"lora": {"rank": 4, "alpha": 8.0, "dora": True}, "freeze": ["layers.0.mlp"]}
    options = {"sharding": "fsdp"}
    ranks = 2


class TestFrozenSharded(OfParts):
    part = {"freeze": ["embed_tokens", "layers.0", "layers.1.*norm*"]}
    options = {"sharding": "fsdp"}
    ranks = 2
