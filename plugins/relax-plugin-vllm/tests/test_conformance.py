# SPDX-License-Identifier: Apache-2.0
"""The engine contract, held against a tiny Qwen3 in the real vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from relax_plugin_vllm.engine import VllmEngine
from relax_plugin_vllm.environment_variables import on_gpu
from relax_plugin_vllm.options import VllmOptions

from relax_core.api import ConfigError
from relax_core.testing.engine import EngineSuite, PrefixChecks
from relax_core.testing.engine_fixture import CONTEXT, EngineFixture, tiny_qwen3

REPEATING = (5, 6, 7, 8) * 6
"""A prompt in which the last tokens stood before, so that every request begins with a draft."""


class TestVllm(PrefixChecks, EngineSuite):
    component = "vllm"
    operation = "aten::"
    options: ClassVar[Mapping[str, Any]] = {"keep_weights": True}
    if not on_gpu():  # vLLM lays nothing down on a CPU, and the engine claims nothing
        test_sleep_frees_and_wake_restores = None
        test_an_unknown_part_cannot_be_offloaded = None


class TestVllmOnTwoRanks(PrefixChecks, EngineSuite):
    """Each layer is split over two processes, and tokens are drafted.

    Tests that start an engine of their own are left out for their time, and those of the thread that feeds the engine.
    """

    component = "vllm"
    samples = 400
    test_pause_holds_requests_and_resume_ends_them_alike = None
    options: ClassVar[Mapping[str, Any]] = {"keep_weights": True, "tensor_parallel": 2, "draft_tokens": 3}
    test_every_format_is_published_and_scored_in_float32 = None
    test_an_adapter_is_applied_to_the_folders_weights_in_every_format = None
    test_a_stopped_engine_says_so_and_serves_nothing = None
    test_a_float32_head_does_not_round_logits = None
    test_caches_kept_over_an_update_are_reported_and_never_shared = None
    if not on_gpu():
        test_sleep_frees_and_wake_restores = None
        test_an_unknown_part_cannot_be_offloaded = None

    def test_samples_and_log_probs_are_those_without_drafts_and_drafts_are_counted(self, lab: EngineFixture) -> None:
        plain = EngineFixture(VllmEngine(), lab.model, lab.model).start()
        prompts = (REPEATING, REPEATING[:9], (9, 4, 11))
        found = {}
        for drafts, engine in ((0, plain), (3, lab)):
            requests = [engine.request(prompt, 24, seed=seed) for seed, prompt in enumerate(prompts)]
            requests += [
                engine.request(REPEATING, 24, temperature=0.0),
                engine.request(REPEATING, 24, seed=9, top_k=3, num_top=2),
            ]
            found[drafts] = engine.generate(*requests)
        plain.stop()
        assert [got.tokens for got in found[3]] == [got.tokens for got in found[0]]
        for got, without in zip(found[3], found[0], strict=True):
            np.testing.assert_allclose(got.log_probs, without.log_probs, atol=1e-4)
            assert [[token for token, _ in pairs] for pairs in got.top] == [
                [token for token, _ in pairs] for pairs in without.top
            ]
            assert without.drafts is None
        counts = [got.drafts for got in found[3] if got.drafts is not None]
        assert all(0 <= kept <= drafted for kept, drafted in counts)
        assert sum(drafted for _, drafted in counts) > 0
        greedy = found[3][3].drafts
        assert greedy is not None and greedy[0] > 0  # greedy samples of a tiny model repeat themselves


def test_a_cache_without_room_for_one_context_is_refused(tmp_path: Path) -> None:
    model = tiny_qwen3(str(tmp_path), 1)
    lab = EngineFixture(VllmEngine(VllmOptions(kv_cache_mb=1)), model, model)
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_mb: got 1; raise it; .*KV cache is needed"):
        lab.start()


@pytest.mark.skipif(on_gpu(), reason="on a GPU the cache takes the memory that is left")
def test_the_cache_grows_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_plugin_vllm.model.CPU_KV_BYTES", 1)
    model = tiny_qwen3(str(tmp_path), 1)
    lab = EngineFixture(VllmEngine(), model, model).start()
    assert CONTEXT <= lab.facts["kv_tokens"] < 2 * CONTEXT
    (got,) = lab.generate(lab.request((5,) * (CONTEXT - 9), 9))
    lab.stop()
    assert len(got.tokens) == 9


def test_a_prompt_in_chunks_draws_the_same_tokens_as_a_whole_one(tmp_path: Path) -> None:
    model = tiny_qwen3(str(tmp_path), 1)
    drawn = {}
    for size in (16, CONTEXT):
        options = VllmOptions(max_batch_rows=4, max_batch_tokens=size, prefix_cache=False)
        lab = EngineFixture(VllmEngine(options), model, model).start()
        drawn[size] = lab.generate(*(lab.request(tuple(range(4, 4 + length)), 9) for length in (3, 40, 50)))
        lab.stop()
    assert [got.tokens for got in drawn[16]] == [got.tokens for got in drawn[CONTEXT]]
    assert all(len(got.tokens) == 9 for got in drawn[16])
