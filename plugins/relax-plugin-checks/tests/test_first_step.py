# SPDX-License-Identifier: Apache-2.0
"""A first step as it should be passes every check; each fault fails its own check, with number, evidence and advice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from relax_plugin_checks.first_step import first_step

from relax_core.api.checks import CheckFinding, FirstStepFacts
from relax_core.observe.first_step import MOST_TASKS, ROUND_TRIP, add_facts, fault_lines, passed_line
from relax_core.testing.check import CheckSuite

WELL = {
    "train/rollout_log_prob_diff_lag0": 8e-8, "train/rollout_log_prob_diff_max": 7e-7, "policy/ratio_max": 1.0000001,
    "policy/ref_kl": 2e-14, "tokens/trained": 90.0, "reward/mean": 0.6, "reward/std": 0.48, "train/grad_norm": 0.9,
    "train/lr": 1e-4, "train/skipped_updates": 0.0, "samples/issued": 32.0, "samples/trained": 16.0,
    "samples/no_gradient": 4.0,
}  # fmt: skip
CONFIG: dict[str, Any] = {"model": {"dtype": "float32"}, "batch": {"updates_per_step": 1}}
TASK = {
    "task": "t1", "prompt_faults": [], "other_ids": "", "turn_end": "<eos>", "closing": "<eos>x", "split_marks": [],
    "answer": {"text": "12", "earned": 1.0, "best": 1.0, "response": "12"},
}  # fmt: skip
ROWS = {
    "samples": 16, "trained": 90, "turns": 16, "ends": [(2, 14, 14), (9, 2, 2)], "empty": [], "wrongly_trained": [],
    "untrained": [], "given": 0, "partly": 0,
}  # fmt: skip
LOG_PROBS = {
    "worst": [(3, 1, 17, 345, -0.1, -4.25, -4.25)], "engine_trainer": 4.15, "trainer_reference": 0.0, "engine_reference": 4.15,
}  # fmt: skip
FACTS: dict[str, Any] = {
    "stops": [(2, "<eos>")],
    "tasks": [TASK],
    "rows": ROWS,
    "log_probs": LOG_PROBS,
    "updates": True,
}


def findings(
    metrics: Mapping[str, Any], config: Mapping[str, Any], told: Mapping[str, Any] | None = None
) -> tuple[CheckFinding, ...]:
    return first_step(FirstStepFacts(config, metrics, told or {}))


class TestConformance(CheckSuite):
    component = first_step
    facts = FirstStepFacts(CONFIG, {**WELL, "reward/std": 0.0}, FACTS)


def checks(
    metrics: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None, **config: Any
) -> dict[str, CheckFinding]:
    """The checks of a sound step with these changes, by name."""
    found = findings(WELL | dict(metrics or {}), CONFIG | config, FACTS | dict(facts or {}))
    return {check.name: check for check in found}


def faults(found: Mapping[str, CheckFinding]) -> dict[str, str]:
    return {name: check.state for name, check in found.items() if check.state not in ("ok", "not applicable")}


def test_a_sound_step_passes_every_check_in_one_line() -> None:
    found = checks()
    assert ROUND_TRIP in found, "`relax try` finds the check by this name"
    assert faults(found) == {} and all(check.state == "ok" and not check.evidence for check in found.values())
    assert fault_lines([*found.values()]) == []
    assert passed_line(found.values()) == (
        "step 1: tokenizer and model agree (model.tokenizer gives other ids than model.path for 0 of 1 prompts), "
        "the template round trip is exact (0 of 1 prompts differ from what the template wrote), "
        "the mask covers what the policy sampled (0 of 90 trained tokens were given, 0 of 16 turns are trained in part), "
        "tokens are trained (90), end-of-turn tokens are trained (14 of 14 turns that end with '<eos>'), "
        "engine and trainer agree (|log-prob difference| 8.0e-08), the ratio is 1 (at most 1), "
        "policy and reference agree (KL 2.0e-14), "
        "the task's own answer earns most (at least as much as the best sample in 1 of 1 tasks), "
        "rewards differ (mean 0.6, spread 0.48), the gradient is finite and not 0 (norm 0.9), "
        "the learning rate is above 0 (0.0001), samples are judged (0 of 32 failed)"
    )


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            {"train/rollout_log_prob_diff_lag0": 0.2},
            "failed: engine and trainer agree: |log-prob difference| 2.0e-01; token",
        ),
        ({"policy/ratio_max": 1.4}, "failed: the ratio is 1: at most 1.4; before an update"),
        ({"policy/ref_kl": 0.3}, "failed: policy and reference agree: KL 3.0e-01; both must start"),
        ({"policy/ref_kl": math.nan}, "failed: policy and reference agree: KL nan"),
        ({"tokens/trained": 0.0}, "failed: tokens are trained: 0; tokens are masked"),
        ({"reward/std": 0.0}, "warning: rewards differ: mean 0.6, spread 0; all samples earn the same"),
        (
            {"train/grad_norm": 0.0, "samples/no_gradient": 16.0},
            "warning: the gradient is finite and not 0: norm 0; 16 of 16 samples have no gradient",
        ),
        ({"train/grad_norm": math.inf}, "failed: the gradient is finite and not 0: norm inf"),
        (
            {"train/skipped_updates": 1.0},
            "failed: the gradient is finite and not 0: norm 0.9; the update was not finite",
        ),
        ({"train/lr": 0.0}, "failed: the learning rate is above 0: 0; the update changes no weight"),
        ({"samples/dropped/failed": 20.0}, "failed: samples are judged: 20 of 32 failed; see their outcomes"),
    ],
)
def test_a_metric_out_of_bounds_fails_its_own_check(metrics: dict[str, float], said: str) -> None:
    found = checks(metrics)
    (line,) = fault_lines([*found.values()])
    assert said in line and line.startswith(("step 1: check failed: ", "step 1: warning: "))


def task(**changed: Any) -> dict[str, Any]:
    return {"tasks": [TASK, TASK | changed]}


def rows(**changed: Any) -> dict[str, Any]:
    return {"rows": ROWS | changed}


OUTPAID = {"text": "12", "earned": 0.0, "best": 1.0, "response": "21"}


@pytest.mark.parametrize(
    ("facts", "name", "state", "said"),
    [
        (
            task(other_ids="token 0 is 5 for 's' instead of 9"), "tokenizer and model agree", "failed",
            "for 1 of 2 prompts; task t1: token 0 is 5 for 's' instead of 9; the model was trained with",
        ),
        (
            task(prompt_faults=["the template leaves out the system message 'Be brief.'"]), "the template round trip is exact",
            "failed", "1 of 2 prompts differ from what the template wrote; task t1: the template leaves out",
        ),
        (
            task(turn_end="", closing="<|im_end|>", split_marks=[("<|im_end|>", 6)]), "the template round trip is exact",
            "failed",
            "after a turn the template writes '<|im_end|>', and turns end with '<eos>'; the tokenizer splits <|im_end|> into 6",
        ),
        (
            task(turn_end="", closing="\nUser: x"), "the template round trip is exact", "warning",
            "without a stop token in 1 of 2",
        ),
        (
            {"tokenizer": {"tokens": 90, "foreign": 0, "misread_ends": [(7, "the"), (99, "")]}}, "tokenizer and model agree",
            "failed", "reads the model's eos_token_id as ordinary text; 7 is 'the'; 99 is no token; the tokenizer is another",
        ),
        (
            {"tokenizer": {"tokens": 1000, "foreign": 11, "misread_ends": []}}, "tokenizer and model agree", "failed",
            "the model lacks 11 of the tokenizer's 1000 tokens; the tokenizer is another model's",
        ),
        (
            task(turn_end="", user_end="<|im_end|>", closing="\n<|im_start|>"), "the template round trip is exact", "failed",
            "the template drops the end of the policy's turn in 1 of 2 prompts; a user's turn ends with '<|im_end|>', and",
        ),
        (
            rows(given=3, partly=3, wrongly_trained=["token 4 (id 7) of group 0, sample 1 is trained and was given"]),
            "the mask covers what the policy sampled", "failed", "3 of 90 trained tokens were given, 3 of 16 turns are trained",
        ),
        (rows(partly=1), "the mask covers what the policy sampled", "warning", "1 of 16 turns are trained in part"),
        (
            rows(empty=["group 0, sample 1"]), "tokens are trained", "warning",
            "90 tokens, and none in 1 of 16 samples; group 0, sample 1",
        ),
        (rows(ends=[(2, 14, 0)]), "end-of-turn tokens are trained", "failed", "0 of 14 turns that end with '<eos>'"),
        (rows(ends=[(9, 16, 16)]), "end-of-turn tokens are trained", "warning", "none of 16 turns ends with '<eos>'; raise"),
        (
            {"stops": [(2, "<eos>"), (3, "<end>")], "rows": ROWS | {"ends": [(3, 16, 16)]}}, "end-of-turn tokens are trained",
            "warning", "16 of 16 turns that end with '<end>'; the template ends turns with '<eos>'; the policy ends its turns",
        ),
        (
            {"tasks": [TASK | {"answer": OUTPAID}]}, "the task's own answer earns most", "failed",
            "in 0 of 1 tasks; task t1: '21' earns 1, and the answer '12' only 0; check that the answers are right",
        ),
        (task(answer=OUTPAID), "the task's own answer earns most", "warning", "in 1 of 2 tasks"),
    ],
)  # fmt: skip
def test_a_fact_that_is_wrong_fails_its_own_check(facts: dict[str, Any], name: str, state: str, said: str) -> None:
    found = checks(facts=facts)
    assert faults(found) == {name: state}
    (line,) = fault_lines([*found.values()])
    assert said in line


@pytest.mark.parametrize(
    ("log_probs", "cause"),
    [
        (LOG_PROBS, "the engine has other or stale weights"),
        (LOG_PROBS | {"trainer_reference": 4.15, "engine_reference": 0.0}, "the trainer has other weights"),
        (LOG_PROBS | {"trainer_reference": 4.15}, "check that both use the same weights"),
        ({"worst": []}, "the engine has other or stale weights"),  # the KL to the reference is 0
        ({}, "the engine has other or stale weights"),
    ],
)
def test_the_third_model_tells_whether_engine_or_trainer_is_wrong(log_probs: dict[str, Any], cause: str) -> None:
    found = checks({"train/rollout_log_prob_diff_lag0": 4.15}, {"log_probs": log_probs})["engine and trainer agree"]
    assert found.state == "failed" and cause in found.advice
    if log_probs.get("worst"):
        assert found.evidence == (
            "token 17 (id 345) of group 3, sample 1: engine -0.100, trainer -4.250, reference -4.250"
        )


def test_log_probs_of_a_few_rows_are_compared_where_no_row_has_a_gradient() -> None:
    metrics = {key: value for key, value in WELL.items() if "rollout_log_prob" not in key}
    found = {check.name: check for check in findings(metrics, CONFIG, FACTS)}["engine and trainer agree"]
    assert (found.state, found.found) == ("failed", "|log-prob difference| 4.2e+00")


def test_formats_and_the_runs_own_settings_decide_what_is_checked() -> None:
    far = {"train/rollout_log_prob_diff_lag0": 0.05, "policy/ratio_max": 1.09}
    assert faults(checks(far, model={"dtype": "bfloat16"})) == {}
    for updates in ({"updates_per_step": 4}, {"passes": 2}):
        several = checks({"policy/ratio_max": 1.4}, batch=updates)
        assert several["the ratio is 1"].state == "not applicable", "later updates of the step have moved the policy"
    other = checks({"policy/ref_kl": 3.0}, reference={"path": "sft"})
    assert other["policy and reference agree"].state == "not applicable"
    warming = checks({"train/grad_norm": 0.0, "train/lr": 0.0}, {"updates": False})
    assert faults(warming) == {}, "only the critic learns in the first steps"
    unjudged = findings({}, CONFIG, FACTS | rows(samples=0, trained=0, turns=0, ends=[]))
    (trained,) = (check for check in unjudged if check.name == "tokens are trained")
    assert trained.state == "not applicable", "every sample of `relax try` has an error, which is shown"
    stopped = checks(facts=rows(ends=[(9, 16, 16)]), rollout={"stop": ["\n"]})
    assert stopped["end-of-turn tokens are trained"].state == "not applicable"


def test_a_dataset_whose_turns_never_end_fails_and_the_rest_of_its_checks_do_not_apply() -> None:
    given = {key: value for key, value in ROWS.items() if key not in ("given", "partly")} | {"ends": [(9, 16, 16)]}
    found = findings(
        {"train/grad_norm": 0.5, "train/lr": 1e-4}, CONFIG, {"stops": [(2, "<eos>")], "rows": given, "updates": True}
    )
    by_state = {check.name: check.state for check in found}
    assert by_state.pop("end-of-turn tokens are trained") == "failed"
    passed = {"tokens are trained", "the gradient is finite and not 0", "the learning rate is above 0"}
    assert {name for name, state in by_state.items() if state == "ok"} == passed
    assert set(by_state.values()) == {"ok", "not applicable"}


def test_without_facts_and_metrics_no_check_applies() -> None:
    found = findings({}, CONFIG)
    assert {check.state for check in found} == {"not applicable"}
    assert passed_line(found) == "" and fault_lines(found) == []


def test_tasks_of_several_deliveries_come_together_and_rows_are_replaced() -> None:
    known: dict[str, Any] = {}
    for number in range(MOST_TASKS):
        add_facts(known, {"stops": [(2, "<eos>")], "tasks": [{"task": number}, {"task": -number}]})
    add_facts(known, {"rows": {"rows": 1}})
    add_facts(known, {"rows": {"rows": 2}})
    assert [one["task"] for one in known["tasks"]] == [0, 0, 1, -1, 2, -2, 3, -3]
    assert known["rows"] == {"rows": 2} and known["stops"] == [(2, "<eos>")]


def test_a_few_tokens_that_the_model_lacks_are_no_fault() -> None:
    own = {"tokens": 1000, "foreign": 10, "misread_ends": []}
    assert faults(checks(facts={"tokenizer": own})) == {}
