# SPDX-License-Identifier: Apache-2.0
"""The torch trainer conforms where only a part of the model is trained: adapters, or what is not frozen."""

from typing import Any, ClassVar

import pytest

from relax_core.testing.trainer import FurtherConfiguration


class OfParts(FurtherConfiguration):
    component = "torch"
    part: ClassVar[dict[str, Any]] = {}

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


@pytest.mark.faults  # `TestAdaptersSharded` freezes and shards too
class TestFrozenSharded(OfParts):
    part = {"freeze": ["embed_tokens", "layers.0", "layers.1.*norm*"]}
    options = {"sharding": "fsdp"}
    ranks = 2
