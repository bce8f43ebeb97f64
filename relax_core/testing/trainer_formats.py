# SPDX-License-Identifier: Apache-2.0
"""Conformance checks of trainers' number formats: weights go out in the engines' format, whatever the trainer computes
in.

A part of `TrainerSuite`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest

from relax_core.api.component import Chosen
from relax_core.api.trainer import Trainer
from relax_core.api.weights import Manifest, Version
from relax_core.testing.trainer_fixture import make_rows

SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class TrainerFormatChecks:
    """Tests of a trainer that is started anew for engines of each format."""

    dtype: ClassVar[str]
    transport: ClassVar[Chosen]

    def running(self, folder: str, **changes: Any) -> AbstractContextManager[Trainer]:
        raise NotImplementedError

    @staticmethod
    def step(trainer: Trainer, step: int, rows: Any) -> Any:
        raise NotImplementedError

    @pytest.mark.parametrize("engines", list(SAFETENSORS))
    def test_weights_go_out_in_the_engines_format(self, folder: str, engines: str) -> None:
        with self.running(folder, publish_dtype=engines) as trainer:
            manifest = self._trained(trainer)
        assert {info.dtype for info in manifest.tensors} == {SAFETENSORS[engines]}
        if engines == self.dtype:
            with self.running(folder) as trainer:
                assert self._trained(trainer).fingerprint == manifest.fingerprint

    def test_a_step_does_not_depend_on_the_engines_format(self, folder: str) -> None:
        results = []
        for engines in SAFETENSORS:
            with self.running(folder, publish_dtype=engines) as trainer:
                results.append(self.step(trainer, 0, make_rows()))
        assert all(result == results[0] for result in results)

    def _trained(self, trainer: Trainer) -> Manifest:
        self.step(trainer, 0, make_rows())
        return trainer.publish(Version("actor", 0, 1), self.transport, "")
