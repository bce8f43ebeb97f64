# SPDX-License-Identifier: Apache-2.0
"""The algorithm suite passes what keeps its promises and fails what does not."""

import inspect
from typing import Any

import pytest

from relax_core.testing.algorithm import AlgorithmSuite

EXERCISED = pytest.mark.one_process("exercises")  # one worker: its fork servers import torch
SUITE = """
import os, torch
from relax_core import learn
from relax_core.api import OLD_LOG_PROBS, Advantages, Algorithm, Loss, Term, Source
from relax_core.testing.algorithm import AlgorithmSuite

class Mine(Algorithm):
    zero_advantage_skips = True
{body}

class TestMine(AlgorithmSuite):
    component = Mine
    deadline_s = {deadline_s}
"""
CLIPPED = """
denominators = frozenset({"tokens"})
def columns(self): return frozenset({OLD_LOG_PROBS})
def advantages(self, groups): return Advantages(learn.group_mean_std(groups.rewards, groups.valid))
def loss(self, batch, policy):
    ratio = (policy.log_probs - batch.column("old_log_probs")).exp()
    value = learn.clipped_surrogate(ratio, batch.advantages, 0.2, 0.3)
    moved = torch.where(batch.loss_mask, ratio, 0.0).sum().detach()
    return Loss({"policy": Term(value)}, {"ratio": (moved, batch.loss_mask.sum())})
"""
PAIRS = """
source = Source.PAIRS
zero_advantage_skips = False
def loss(self, batch, policy):
    chosen, rejected = batch.pair(batch.sequence_sum(policy.log_probs))
    return Loss({"dpo": Term(-torch.nn.functional.logsigmoid(chosen - rejected), denominator="pairs", per="pair")})
"""
ROWS = (
    CLIPPED.replace("Term(value)", "Term(batch.sequence_mean(value), denominator='mine', per='row')")
    .replace('"tokens"', '"mine"')
    .replace("batch.loss_mask.sum())}", "batch.loss_mask.sum())}, {'mine': torch.tensor(float(batch.num_rows))}")
)
CRITIC = (
    CLIPPED
    + """
fits = ("critic",)
def fit_loss(self, fit, batch, outputs):
    return Loss({"value": Term((outputs.output("values") - batch.advantages).square())})
"""
)
GOOD = {"clipped": CLIPPED, "pairs": PAIRS, "rows": ROWS, "critic": CRITIC}
APART = {
    "wrong type": (CLIPPED.replace("return Loss(", "return max("), ""),
    "blocking": (CLIPPED.replace("ratio = ", "__import__('time').sleep(3600)\n    ratio = "), "blocks for ever"),
    "random": (CLIPPED.replace("Term(value)", "Term(value * torch.rand(()))"), "gave another result"),
}
ALONE = {
    "wrong shape": ("Term(value)", "Term(value.sum()[None])", "per token means"),
    "undeclared": ("Term(value)", "Term(value, denominator='rows')", "declare all"),
    "reduces": ("Term(value)", "Term(value / value.numel())", "splitting_into_chunks"),
    "mixes rows": ("Term(value)", "Term(value - value.mean())", "padding_changes_nothing"),
    "reads masked": ("Term(value)", "Term(value + policy.log_probs.sum())", "have a gradient"),
    "not a count": ("batch.loss_mask.sum())}", "torch.tensor(1.0))}", "is not a sum"),
    "metrics": ("(moved, batch.loss_mask.sum())", "(moved,)", "loss_is_named_terms"),
    "loss type": ("return Loss(", "return dict(one=1) or Loss(", "return Loss(terms="),
    "advantages type": ("return Advantages(", "return (", "return Advantages"),
    "batch mean": (
        "learn.group_mean_std(groups.rewards, groups.valid)",
        "groups.rewards - groups.rewards.mean()",
        "groups_do_not",
    ),
    "detached": ("Term(value)", "Term(value.detach() * policy.log_probs)", "stops_gradients"),
    "silent gradient": ("Term(value)", "Term(value + policy.log_probs)", "rows would be left out"),
}


def suite_of(body: str, deadline_s: float = 300.0) -> type[AlgorithmSuite]:
    scope: dict[str, Any] = {"__name__": "mutant"}
    exec(SUITE.format(body="\n".join(f"    {line}" for line in body.splitlines()), deadline_s=deadline_s), scope)
    return scope["TestMine"]


def told_by(suite: type[AlgorithmSuite], seen: Any = None) -> dict[str, str]:
    """Return what each test says that is not skipped, empty if it passes; without `seen` of those that need no process."""
    told = {}
    for name in (name for name in dir(suite) if name.startswith("test_")):
        needs = inspect.signature(getattr(suite, name)).parameters.keys() - {"self"}
        if "seen" in needs and seen is None:
            continue
        made = suite.make()
        given = {"made": made, "each": [(fit, suite.rows(made)) for fit in ("", *made.fits)], "seen": seen}
        try:
            getattr(suite(), name)(**{key: given[key] for key in needs})
            told[name] = ""
        except pytest.skip.Exception:
            continue
        except Exception as error:
            told[name] = f"{name}: {error}"
    return told


@pytest.mark.process
@EXERCISED
@pytest.mark.parametrize("name", GOOD)
def test_a_good_algorithm_conforms(name: str) -> None:
    told = told_by(suite_of(GOOD[name]), suite_of(GOOD[name]).exercised())
    assert [said for said in told.values() if said] == []
    assert len(told) >= 11


@pytest.mark.process
@EXERCISED
@pytest.mark.parametrize("name", APART)
def test_a_mutant_that_needs_a_process_of_its_own_fails(name: str) -> None:
    body, said = APART[name]
    suite = suite_of(body, 0.5 if said == "blocks for ever" else 300.0)
    try:
        told = told_by(suite, suite.exercised()).values()
    except pytest.fail.Exception as failed:
        told = [str(failed)]
    assert any(line and said in line for line in told), told


@pytest.mark.parametrize(("old", "new", "said"), ALONE.values(), ids=ALONE)
def test_a_mutant_fails(old: str, new: str, said: str) -> None:
    assert old in CLIPPED
    told = told_by(suite_of(CLIPPED.replace(old, new)))
    assert any(said in line for line in told.values()), told
