# SPDX-License-Identifier: Apache-2.0
"""The stand-ins are needed: this fails when vLLM's seeing models can be imported on a CPU without them, and they can go."""

from __future__ import annotations

import subprocess
import sys

import pytest
from relax_plugin_vllm.cpu_stand_ins import stand_ins
from relax_plugin_vllm.environment_variables import ALWAYS, ON_CPU

from relax_core.api.errors import InfrastructureError

IMPORTED = "import vllm.model_executor.models.qwen3_vl"


@pytest.mark.faults  # slow, and its result changes with the lock only
def test_seeing_models_cannot_be_imported_without_them() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={**ALWAYS, **ON_CPU},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode != 0
    assert "torchvision" in ran.stderr


def test_stand_ins_are_removed_after_use_and_refused_with_a_gpu() -> None:
    with stand_ins(gpu=False):
        assert "torchvision" in sys.modules
    assert "torchvision" not in sys.modules
    with pytest.raises(InfrastructureError, match="on a machine with a GPU"), stand_ins(gpu=True):
        pass
