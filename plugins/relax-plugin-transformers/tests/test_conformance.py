# SPDX-License-Identifier: Apache-2.0
"""The engine contract, held against a tiny Qwen3 on this machine's CPU or GPU."""

from relax_core.testing.engine import EngineSuite


class TestTransformersEngine(EngineSuite):
    component = "transformers"
    operation = "aten::"


class TestSmallBatches(EngineSuite):
    """Few rows, short prefill passes, frequent deltas: the paths that a small default workload never takes."""

    component = "transformers"
    options = {"max_batch_rows": 3, "max_batch_tokens": 200, "max_prefill_tokens": 7, "deltas_every": 3}
    samples, prompts_at_once = 600, 10
    # how weights arrive does not depend on batches
    test_a_version_that_is_not_this_model_is_refused_whole = None
    test_stale_bytes_are_refused_whole = None
    test_abandoned_incarnation_older_step_and_other_model_are_refused = None
    test_each_adapter_is_applied_to_the_folders_weights = None
    test_a_wrong_adapter_is_refused_whole = None
    test_deltas_give_what_the_whole_version_would = None
    test_a_wrong_delta_is_refused_whole = None
    test_every_format_is_published_and_scored_in_float32 = None
    test_an_adapter_is_applied_to_the_folders_weights_in_every_format = None
