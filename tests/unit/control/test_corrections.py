# SPDX-License-Identifier: Apache-2.0
"""A plan says which correction a run has, which differences it corrects, and why it is the default."""

import json

import numpy as np
import pytest
import torch
from relax_plugin_policy_gradient.grpo import GRPO, GRPOOptions

from relax_core import learn
from relax_core.api import Ragged, RowBatch, RowId
from tests.unit.control import conftest

START = "the ratio is to the policy at the step's start, and "


def told(catalogue, *overrides, algorithm="grpo", **layer):
    made = conftest.planned(catalogue, *overrides, algorithm=algorithm, placement="async", **layer)
    return [note for note in made.notes if note.startswith("algorithm.correction")]


def test_a_run_without_lag_in_float32_has_nothing_to_correct(catalogue):
    (note,) = told(catalogue, "max_staleness=0")
    assert note.startswith("algorithm.correction is 'behaviour' (the default of grpo, since GRPO learnt most")
    assert note.endswith("engine and trainer differ by rounding alone, so it changes little")


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("max_staleness=1", "up to 1 version of lag"),
        ("max_staleness=4", "up to 4 versions of lag"),
        ("max_staleness=unbounded", "lag without a bound"),
        ("batch.updates_per_step=4", "4 updates per step"),
        ("batch.passes=2", "2 updates per step"),
        ("rollout.dtype=bfloat16", "engines in bfloat16 beside trainers in float32"),
        ("model.dtype=bfloat16", "engines and trainers that round differently in bfloat16"),
        ("rollout.top_p=0.9", "a truncated distribution (rollout.top_p, rollout.top_k)"),
        ("rollout.top_k=20", "a truncated distribution (rollout.top_p, rollout.top_k)"),
    ],
)
def test_each_difference_between_sampling_and_training_is_named(catalogue, override, difference):
    on_policy = () if "staleness" in override else ("max_staleness=0",)
    (note,) = told(catalogue, *on_policy, override)
    effect = "the ratio is to the policy that sampled, so its bounds limit all of this"
    assert note.partition("; ")[2] == f"to correct: {difference}; {effect}"


def test_experts_that_are_not_replayed_are_a_difference(catalogue, tmp_path):
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    (note,) = told(catalogue, "max_staleness=0", f"model.path={tmp_path}")
    assert "to correct: experts that engine and trainer choose apart (model.routing_replay is off); " in note
    (note,) = told(catalogue, "max_staleness=0", f"model.path={tmp_path}", "model.routing_replay=rollout")
    assert "experts" not in note


@pytest.mark.parametrize(
    ("settings", "effect"),
    [
        (("none",), "nothing corrects this"),
        (("truncate",), f"{START}a token's weight is at most 2"),
        (
            ("mask", "correction_level=sequence", "correction_floor=0.5"),
            f"{START}tokens are left out if a sequence's weight is outside 0.5 to 2",
        ),
        (
            ("reject", "correction_level=geometric", "correction_cap=1.5"),
            f"{START}tokens are left out if the mean weight of a sequence is outside 0 to 1.5",
        ),
    ],
)
def test_another_correction_is_told_with_its_effect_and_the_default(catalogue, settings, effect):
    kind, *more = settings
    (note,) = told(catalogue, "max_staleness=2", f"algorithm.correction={kind}", *(f"algorithm.{one}" for one in more))
    default = "(the default of grpo is 'behaviour')"
    assert note == f"algorithm.correction is '{kind}' {default}; to correct: up to 2 versions of lag; {effect}"


@pytest.mark.parametrize(
    ("algorithm", "default", "reason"),
    [
        (
            "gspo",
            "truncate",
            (
                "the bounds of its sequences' ratios are narrower than the rounding of an engine, though at a lag of 1 GSPO "
                "learnt more with 'behaviour' in 4 of 5 seeds (docs/benchmarks.md#defaults)"
            ),
        ),
        ("rloo", "truncate", "it has no ratio that a clip could bound"),
        ("m2po", "behaviour", "it has no other"),
    ],
)
def test_the_default_of_each_shape_of_algorithm_has_its_reason(catalogue, algorithm, default, reason):
    (note,) = told(catalogue, "max_staleness=1", algorithm=algorithm)
    assert note.startswith(f"algorithm.correction is '{default}' (the default of {algorithm}, since {reason}); ")


def test_no_other_default_is_suggested_without_lag(catalogue):
    (note,) = told(catalogue, "max_staleness=0", algorithm="gspo")
    assert "rounding of an engine)" in note


def test_each_algorithm_of_a_run_has_its_own_line(catalogue):
    others = [{"name": "single-turn", "label": "other", "algorithm": "rloo"}]
    notes = told(catalogue, environments=others)
    assert [note.partition("the default of ")[2].partition(",")[0] for note in notes] == ["grpo", "rloo"]


@pytest.mark.parametrize("algorithm", ["sft", {"name": "distillation", "mode": "loss"}])
def test_an_algorithm_with_its_own_loss_has_no_line(catalogue, algorithm):
    teachers = [] if algorithm == "sft" else [{"path": "t"}]
    assert told(catalogue, algorithm=algorithm, teachers=teachers) == []


@pytest.mark.parametrize(("overrides", "algorithm", "said"), [
    (("rollout.top_p=0.9",), "grpo", 'rollout.top_p = 0.9 with algorithm.correction = \'behaviour\' (grpo)'),
    (("rollout.top_k=20", "rollout.top_p=0.5"), "dapo", "rollout.top_p = 0.5 and rollout.top_k = 20 with"),
    (("rollout.top_k=20",), "dppo", "rollout.top_k = 20 with"),
    (("rollout.top_k=20",), "m2po", "rollout.top_k = 20 with"),
    (("rollout.top_p=0.9", "algorithm.correction=truncate"), "grpo", ""),
    (("rollout.top_p=0.9", "algorithm.correction=none"), "grpo", ""),
    (("rollout.top_p=0.9",), "cispo", ""),
    (("rollout.top_p=0.9",), "gspo", ""),
    (("rollout.top_p=0.9",), "rloo", ""),
    ((), "grpo", ""),
])  # fmt: skip
def test_a_ratio_to_an_engine_that_truncates_is_warned_of(catalogue, overrides, algorithm, said):
    made = conftest.planned(catalogue, "max_staleness=1", *overrides, algorithm={"name": algorithm}, placement="async")
    warnings = [note for note in made.notes if note.startswith("warning: rollout.")]
    assert len(warnings) == bool(said)
    if said:
        assert said in warnings[0] and warnings[0].endswith("set rollout.top_p = 1 and rollout.top_k = 0")
        assert ('set algorithm.correction = "truncate", or' in warnings[0]) == (algorithm != "m2po")


def test_truncate_keeps_the_gradient_that_behaviour_loses_under_a_truncated_distribution():
    """Over all tokens of a nucleus that holds 0.7 of the probability; the policy has not moved since it sampled."""
    share, kept = 0.7, torch.tensor([0.4, 0.2, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -2.0], dtype=torch.float64)
    ids = tuple(RowId(0, sample, 0, 0) for sample in range(3))
    pairs = {"old_log_probs": kept.log(), "rollout_log_probs": (kept / share).log(), "advantages": advantages}
    rows = {name: Ragged.of([np.array([0.0, float(value)]) for value in values]) for name, values in pairs.items()}
    rows["tokens"] = Ragged.of([np.array([1, token], np.int32) for token in range(3)])
    rows["loss_mask"] = Ragged.of([np.array([0, 1], np.uint8)] * 3)
    batch, slopes = learn.PackedBatch(RowBatch(ids, rows), dtype=torch.float64), {}
    for correction in ("truncate", "behaviour", "none"):
        log_probs = batch.column("old_log_probs").clone().requires_grad_()
        algorithm = GRPO(GRPOOptions(correction=correction, aggregation="token"))
        (values,) = (
            term.value for term in algorithm.loss(batch, learn.Outputs({"log_probs": log_probs})).terms.values()
        )
        slopes[correction] = torch.autograd.grad(values[batch.loss_mask].sum(), log_probs)[0][batch.loss_mask]
    expected = -kept * advantages  # of each token, weighted by how often the engine samples it
    torch.testing.assert_close(slopes["truncate"] * kept / share, expected)
    torch.testing.assert_close(slopes["behaviour"] * kept / share, torch.stack([expected[0], *torch.zeros(2).double()]))
    torch.testing.assert_close(slopes["none"] * kept / share, expected / share)
