# SPDX-License-Identifier: Apache-2.0
"""What training any agent must hold, and the hardest cases of it, by number: each names the tests that show it.

A test that is renamed or goes away is missed here.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_core import learn
from relax_core.api import Algorithm, AttemptId, Chosen, Claim, Outcome, Ragged, RowBatch, RowId, Sealed
from relax_core.registry import Catalogue
from relax_core.roles.step import ClaimedRows

ROOT = Path(__file__).parents[2]
AGENTS, MCP = "plugins/relax-plugin-agents/tests", "plugins/relax-plugin-mcp/tests"
CHAT = "plugins/relax-plugin-chat/tests"
Shown = dict[int, tuple[str, dict[str, tuple[str, ...]]]]

INVARIANTS: Shown = {
    1: ("a row is what an engine saw", {
        f"{AGENTS}/test_history.py": ("test_every_answer_is_trained_once_behind_exactly_what_its_engine_saw",),
        "tests/graph/test_agent.py": ("test_an_agent_is_trained_on_exactly_what_it_was_answered",),
        "tests/clients/test_clients.py": ("test_a_clients_conversation_is_one_row_trained_as_sampled",),
    }),
    2: ("every sampled token is trained once, or has a counted reason", {
        "tests/unit/sampling/test_branches.py": ("test_every_sampled_token_is_trained_once_or_was_discarded",),
        f"{AGENTS}/test_history.py": ("test_unread_turns_are_counted_and_not_trained",),
    }),
    3: ("one call is one node, streamed or not", {
        f"{AGENTS}/test_gateway.py": (
            "test_a_request_that_is_sent_again_in_flight_is_one_call",
            "test_streamed_and_whole_answers_have_equal_text_and_training_rows",
            "test_a_client_that_comes_late_to_a_stream_reads_it_from_its_beginning",
        ),
    }),
    4: ("a sample weighs once, however many rows it has", {
        "tests/contracts/test_agent_cases.py": ("test_a_sample_weighs_once_however_many_rows_it_has",),
        "tests/unit/learn/test_groups.py": ("test_an_advantage_a_sample_reaches_every_trained_token_of_its_rows",),
    }),
    5: ("the same history is the same tokens in any order of arrival", {
        f"{AGENTS}/test_history.py": ("test_branches_draw_by_their_history_and_not_by_their_place_in_time",),
    }),
    6: ("the run's sampling wins, and what would change the distribution is refused", {
        f"{AGENTS}/test_gateway.py": ("test_a_setting_that_changes_the_distribution_is_refused_without_a_retry",),
        f"{AGENTS}/test_dialects.py": (
            "test_sampling_settings_of_the_client_are_reported_as_overridden",
            "test_a_setting_that_is_not_served_is_refused_by_its_name",
        ),
    }),
    7: ("an agent's key opens its own model routes alone", {
        f"{AGENTS}/test_gateway.py": ("test_each_key_opens_only_its_own_routes_and_expires_with_its_sample",),
        f"{AGENTS}/test_boxed.py": ("test_a_box_has_the_policy_and_the_task_but_nothing_that_would_help_to_cheat",),
    }),
    8: ("a failure is an outcome, never a reward of zero", {
        f"{AGENTS}/test_environment.py": ("test_an_agent_that_fails_has_an_outcome_and_no_reward",),
        f"{AGENTS}/test_boxed.py": ("test_a_judge_without_a_verdict_is_an_outcome_and_no_zero",),
        f"{MCP}/test_environment.py": ("test_a_server_that_fails_is_the_outcome_of_the_sample_and_no_reward",),
    }),
    9: ("nothing outlives its sample", {
        f"{AGENTS}/test_environment.py": ("test_processes_left_by_a_program_end_with_its_sample",),
        f"{AGENTS}/test_gateway.py": (
            "test_a_local_gateway_serves_the_same_routes_to_this_user_alone_and_leaves_nothing",
        ),
        f"{MCP}/test_bad_servers.py": ("test_processes_of_a_server_end_with_its_sample",),
        "relax_core/testing/sandbox.py": ("test_processes_left_by_a_program_end_with_it",),
    }),
    10: ("templates and dialects agree", {
        f"{CHAT}/test_chat.py": ("test_ids_of_a_canonical_conversation_are_those_of_its_rendered_text",),
        "tests/clients/test_renderers.py": ("test_a_conversation_continues_with_the_tokens_of_the_other_library",),
        f"{AGENTS}/test_gateway.py": ("test_one_conversation_in_three_dialects_is_one_tree",),
    }),
    11: ("every reward pays most for what is right, least for nothing, and is bounded", {
        "plugins/relax-plugin-rewards/tests/test_every_reward.py": (
            "test_any_text_has_a_finite_score_within_the_bounds_and_the_same_each_time",
            "test_the_right_answer_pays_most_and_nothing_pays_least",
        ),
    }),
    12: ("no engine serves before its receipt", {
        "tests/unit/engines/test_weight_updater.py": (
            "test_a_replaced_engine_serves_only_after_its_receipt_for_the_newest_version",
        ),
    }),
}  # fmt: skip
CASES: Shown = {
    1: ("thoughts left out by the template, or by the client", {
        "tests/clients/test_clients.py": ("test_a_clients_conversation_is_one_row_trained_as_sampled",),
        f"{AGENTS}/test_history.py": ("test_an_answer_is_known_again_as_clients_send_it",),
    }),
    2: ("two agents at once with equal prompts", {
        f"{AGENTS}/test_history.py": ("test_two_agents_with_equal_prompts_have_answers_of_their_own",),
        f"{AGENTS}/test_environment.py": ("test_parallel_calls_of_one_sample_are_rows_of_it",),
    }),
    3: ("a summary that the policy wrote", {
        f"{AGENTS}/test_history.py": ("test_a_summary_that_the_policy_wrote_begins_a_conversation_as_given_text",),
    }),
    4: ("a retry while the first still samples, streamed too", {
        f"{AGENTS}/test_gateway.py": (
            "test_a_request_that_is_sent_again_in_flight_is_one_call",
            "test_a_client_that_comes_late_to_a_stream_reads_it_from_its_beginning",
        ),
    }),
    5: ("a retry of the last call", {
        f"{AGENTS}/test_gateway.py": ("test_an_answer_whose_client_left_is_returned_to_the_repeated_request",),
        f"{AGENTS}/test_history.py": ("test_a_request_sent_again_is_the_same_call_until_something_is_built_on_it",),
    }),
    6: ("arguments written again, in another order, with keys twice, or invalid", {
        f"{AGENTS}/test_history.py": ("test_calls_are_known_again_by_name_and_arguments",),
        f"{CHAT}/test_tool_call_formats.py": ("test_arguments_that_fit_no_tool_are_reported",),
    }),
    7: ("an answer cut by a limit, then extended", {
        f"{AGENTS}/test_history.py": ("test_an_answer_that_a_limit_cut_can_be_extended_and_an_ended_one_cannot",),
    }),
    8: ("text that spells special tokens, a call inside a thought", {
        f"{CHAT}/test_chat.py": ("test_sampled_ids_are_never_encoded_again",),
        f"{CHAT}/test_tool_call_formats.py": ("test_calls_inside_a_thought_do_not_count",),
    }),
    9: ("tools or a system prompt that change, nonces", {
        f"{AGENTS}/test_history.py": (
            "test_a_change_of_tools_starts_another_conversation",
            "test_a_nonce_in_the_system_prompt_does_not_start_another_conversation",
        ),
    }),
    10: ("weights published in the middle of a turn", {
        "tests/unit/engines/test_pool_updates.py": (
            "test_a_publish_in_mid_generation_changes_only_the_tokens_after_it",
        ),
    }),
    11: ("a deadline while a tool runs, a late turn", {
        f"{AGENTS}/test_environment.py": ("test_a_program_that_never_ends_is_killed",),
        f"{AGENTS}/test_gateway.py": (
            "test_a_request_that_hangs_ends_with_its_sample",
            "test_each_key_opens_only_its_own_routes_and_expires_with_its_sample",
        ),
    }),
    12: ("n > 1, stops, JSON mode, forced tools, images in results of tools", {
        f"{AGENTS}/test_dialects.py": (
            "test_a_setting_that_is_not_served_is_refused_by_its_name",
            "test_limits_and_stops_are_read_from_each_dialects_fields",
            "test_images_are_read_by_data_and_by_url_and_in_results_of_tools",
        ),
    }),
    13: ("heartbeats that every client bears", {
        f"{AGENTS}/test_gateway.py": ("test_a_stream_shows_life_while_its_answer_is_awaited",),
        f"{AGENTS}/test_dialects_answers.py": ("test_text_and_calls_of_a_stream_are_those_of_the_turn",),
    }),
    14: ("fork bombs, endless output, daemons, forged verdicts, links out of the box", {
        f"{AGENTS}/test_boxed.py": (
            "test_files_left_by_an_agent_cannot_forge_a_verdict", "test_an_agent_that_fails_or_meets_a_limit_is_judged",
        ),
        "relax_core/testing/sandbox.py": (
            "test_a_greedy_program_ends_within_its_limits_and_the_box_continues",
            "test_only_regular_files_of_the_box_are_reached",
        ),
    }),
    15: ("an MCP server that dies in a call, a shared one with a sample's state", {
        f"{MCP}/test_bad_servers.py": (
            "test_a_server_that_fails_in_a_call_is_not_an_answer_and_the_next_sample_has_another",
        ),
        f"{MCP}/test_environment.py": (
            "test_servers_of_samples_share_no_state_and_servers_of_workers_do",
        ),
    }),
}  # fmt: skip


@pytest.mark.parametrize(("shown", "number"), [(INVARIANTS, 12), (CASES, 15)], ids=["invariants", "cases"])
def test_every_case_names_existing_tests(shown: Shown, number: int) -> None:
    assert list(shown) == list(range(1, number + 1))
    gone = [
        f"{what}: {file}::{name}"
        for what, places in shown.values()
        for file, names in places.items()
        for name in names
        if not re.search(rf"^ *(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not gone


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "gdpo"])
def test_a_sample_weighs_once_however_many_rows_it_has(name: str) -> None:
    """One right sample of one row and nine wrong rows of another sample, trained in several chunks."""
    ids = (RowId(0, 0, 0, 0), *(RowId(0, 1, 0, row) for row in range(9)))
    lengths = np.array([4, *(2 + row % 3 for row in range(9))])
    starts = np.cumsum(lengths) - lengths
    mask = np.ones(lengths.sum(), np.uint8)
    mask[starts] = 0
    columns = {"tokens": np.arange(len(mask), dtype=np.int32), "loss_mask": mask}
    log_probs = np.full(len(mask), -1.0, np.float32)
    columns |= dict.fromkeys(("rollout_log_probs", "old_log_probs", "ref_log_probs"), log_probs)
    rows = RowBatch(ids, {key: Ragged(values, lengths) for key, values in columns.items()})
    trained = [3, int(mask.sum()) - 3]
    samples = {
        AttemptId(0, place, 0): Sealed(
            AttemptId(0, place, 0),
            number,
            Outcome.FINISHED,
            reward,
            trained_tokens=trained[place],
            parts={"exact": reward},
        )
        for place, (number, reward) in enumerate([(1, 1.0), (9, 0.0)])
    }
    options = {"kl_coef": 0.5, "kl_estimator": "k1", "entropy_coef": 0.25}
    algorithm = Catalogue.load(()).build(Chosen("algorithm", name, options), Algorithm)
    credit = learn.Grouping(rows, samples, weights={"exact": 1.0})
    rows = rows.with_columns(credit.columns(algorithm.advantages(credit.groups)))
    claimed = ClaimedRows(Claim(1, "actor", ids, samples, (0,)), rows)
    denominators = learn.Denominators(learn.count(claimed.rows))
    weights: dict[str, np.ndarray] = {}
    for chunk in ([0, 1, 2], [3], [4, 5, 6, 7, 8, 9]):
        batch = learn.PackedBatch(claimed.take(chunk), dtype=torch.float64)
        outputs = {key: batch.column("old_log_probs").clone().requires_grad_() for key in ("log_probs", "entropy")}
        terms = learn.reduce(algorithm.loss(batch, learn.Outputs(outputs)), batch, denominators)
        for term, leaf in (("policy", "log_probs"), ("kl", "log_probs"), ("entropy", "entropy")):
            (slopes,) = torch.autograd.grad(terms[term], outputs[leaf], retain_graph=True)
            per_sample = [float(slopes[batch.row_of_token == row].sum()) for row in range(len(chunk))]
            of_sample = np.bincount([ids[row].sample for row in chunk], per_sample, 2)
            weights[term] = weights.get(term, 0.0) + of_sample
    right, wrong = weights["policy"]
    assert right == pytest.approx(-wrong) and right < 0
    assert weights["kl"] == pytest.approx([0.25, 0.25]) and weights["entropy"] == pytest.approx([-0.125, -0.125])
