# SPDX-License-Identifier: Apache-2.0
"""The engine contract, held against a tiny Qwen3 in the real vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from relax_plugin_vllm.environment_variables import on_gpu

from relax_core.testing.engine import EngineSuite, PrefixChecks


class TestVllm(PrefixChecks, EngineSuite):
    component = "vllm"
    operation = "aten::"
    options: ClassVar[Mapping[str, Any]] = {"keep_weights": True}
    if not on_gpu():  # vLLM lays nothing down on a CPU, and the engine claims nothing
        test_sleep_frees_and_wake_restores = None
        test_an_unknown_part_cannot_be_offloaded = None


class TestVllmOnTwoRanks(PrefixChecks, EngineSuite):
    """Each layer is split over two processes. Tests that start an engine of their own are left out for their time."""

    component = "vllm"
    options: ClassVar[Mapping[str, Any]] = {"keep_weights": True, "tensor_parallel": 2}
    test_every_format_is_published_and_scored_in_float32 = None
    test_an_adapter_is_applied_to_the_folders_weights_in_every_format = None
    test_a_stopped_engine_says_so_and_serves_nothing = None
    test_a_float32_head_does_not_round_logits = None
    test_caches_kept_over_an_update_are_reported_and_never_shared = None
    if not on_gpu():
        test_sleep_frees_and_wake_restores = None
        test_an_unknown_part_cannot_be_offloaded = None
