# SPDX-License-Identifier: Apache-2.0
"""The engine contract, held against a tiny Qwen3 in the real vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from relax_plugin_vllm.environment_variables import on_gpu

from relax_core.testing.engine import EngineSuite, PrefixChecks


class TestVllm(PrefixChecks, EngineSuite):
    component = "vllm"
    options: ClassVar[Mapping[str, Any]] = {"keep_weights": True}
    if not on_gpu():  # vLLM lays nothing down on a CPU, and the engine claims nothing
        test_sleep_frees_and_wake_restores = None
        test_an_unknown_part_cannot_be_offloaded = None
