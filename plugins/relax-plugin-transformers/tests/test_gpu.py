# SPDX-License-Identifier: Apache-2.0
"""On a GPU the engine samples what a CPU samples, before and after an update, and frees memory when offloaded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from relax_core.api.engine import Delta
from relax_core.testing.engine_fixture import PROMPTS, EngineFixture

pytestmark = pytest.mark.gpu
GPU, CPU = {"device": "cuda"}, {"device": "cpu"}
Start = Callable[..., EngineFixture]


def greedy(lab: EngineFixture) -> list[Delta]:
    return lab.generate(*(lab.request(prompt, 24, temperature=0.0) for prompt in PROMPTS))


def assert_alike(found: list[Delta], expected: list[Delta]) -> None:
    assert [delta.tokens for delta in found] == [delta.tokens for delta in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-4)


def test_greedy_tokens_equal_those_of_a_cpu_before_and_after_an_update(
    start_lab: Start, folders: tuple[str, str]
) -> None:
    on_gpu, on_cpu = (start_lab(*folders, options=options) for options in (GPU, CPU))
    first = greedy(on_gpu)
    assert_alike(first, greedy(on_cpu))
    receipts = []
    for lab in (on_gpu, on_cpu):
        manifest = lab.publish()
        receipts.append((lab.update(manifest).resident, manifest.fingerprint))
    assert receipts[0] == receipts[1] and receipts[0][0] == receipts[0][1]
    then = greedy(on_gpu)
    assert [delta.tokens for delta in then] != [delta.tokens for delta in first]
    assert_alike(then, greedy(on_cpu))


def test_a_seeded_sample_does_not_depend_on_the_batch(start_lab: Start, folders: tuple[str, str]) -> None:
    lab = start_lab(*folders, options=GPU)
    requests = [lab.request(prompt, 24, seed=7) for prompt in PROMPTS]
    together = [delta.tokens for delta in lab.generate(*requests)]
    assert together == [lab.generate(lab.request(prompt, 24, seed=7))[0].tokens for prompt in PROMPTS]


def test_offloaded_weights_leave_the_gpu_and_return(start_lab: Start, folders: tuple[str, str]) -> None:
    import torch

    lab = start_lab(*folders, options=GPU)
    before, held = greedy(lab), torch.cuda.memory_allocated()
    freed = lab.run(lab.engine.offload(["weights", "kv"]))
    assert freed > 0 and held - torch.cuda.memory_allocated() >= 4 * lab.facts["parameters"]
    lab.run(lab.engine.onload(["weights", "kv"]))
    assert_alike(greedy(lab), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_scores_stay_near_float32_on_a_cpu(start_lab: Start, folders: tuple[str, str], dtype: str) -> None:
    on_gpu, on_cpu = start_lab(*folders, options=GPU, dtype=dtype), start_lab(*folders, options=CPU)
    for half, whole in zip(*(lab.run(lab.engine.score(PROMPTS)) for lab in (on_gpu, on_cpu)), strict=True):
        np.testing.assert_allclose(half, whole, rtol=0, atol=0.3)
