# SPDX-License-Identifier: Apache-2.0
"""The engine contract, held against a tiny Qwen3 on this machine's CPU or GPU."""

from relax_core.testing.engine import EngineSuite


class TestTransformersEngine(EngineSuite):
    component = "transformers"


class TestSmallBatches(EngineSuite):
    """Few rows, short prefill passes, frequent deltas: the paths that a small default workload never takes."""

    component = "transformers"
    options = {"max_batch_rows": 3, "max_batch_tokens": 200, "max_prefill_tokens": 7, "deltas_every": 3}
    samples, prompts_at_once = 600, 10


class TestEagerAttention(EngineSuite):
    component = "transformers"
    options = {"attention": "eager"}
