# SPDX-License-Identifier: Apache-2.0
"""Rows of a dataset through the real bus and actor, in virtual time: every row once an epoch, in order, and no publishing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.api import Context, Role
from relax_core.api.errors import ConfigError
from relax_core.api.events import Logged, StepFinished, WeightsPublished
from relax_core.roles import RankGroup, StepTimes, StepTrainer, TrainerDeviceLease
from tests.unit.roles.simulated_run import SimulatedRun


def simulation(folder: Path, algorithm: str, rows: int = 16, **settings: object) -> SimulatedRun:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "written.jsonl"
    data.write_text("".join(
        json.dumps({"prompt": f"p{at}", "completion": "yes", "chosen": "yes", "rejected": "no"}) + "\n" for at in range(rows)
    ))  # fmt: skip
    table = {"data": {"train": str(data), "shuffle": False}, "rewards": [], **settings}
    return SimulatedRun(folder, algorithm=algorithm, **table)


@pytest.mark.parametrize(
    ("algorithm", "members", "placement"), [("sft", 1, "colocate"), ("dpo", 2, "hybrid"), ("reward-model", 2, "async")]
)
def test_every_step_trains_its_rows_and_the_ledger_balances(
    tmp_path: Path, algorithm: str, members: int, placement: str
) -> None:
    outcome = simulation(tmp_path, algorithm, steps=6, placement=placement).run()
    outcome.assert_whole(6, 0, drops=True)
    assert outcome.account.trained == 6 * 4 * members == outcome.account.issued
    assert not outcome.account.dropped and not outcome.account.in_flight
    assert not outcome.of("engine", "generate") and not outcome.of("actor", "publish")
    assert not outcome.told(WeightsPublished)
    assert not any(key.startswith(("lag/", "reward/")) for step in outcome.steps for key in step.metrics)


def test_rows_are_ready_a_step_ahead_and_no_further(tmp_path: Path) -> None:
    outcome = simulation(tmp_path, "sft", steps=6).run()
    assert max(outcome.metric("samples/in_flight")) == 2 * 4  # the step that is trained, and one more
    assert max(outcome.metric("samples/issued")) == 24


def test_rows_that_a_set_shares_are_reported_and_refused_above_the_limit(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "P1.", "completion": "Yes"}\n{"prompt": "p1", "completion": "no"}\n')
    table = {"every": 2, "sets": [{"name": "held", "path": str(held)}]}
    outcome = simulation(tmp_path, "sft", steps=2, eval={**table, "max_overlap": 0.5}).run()
    said = [(event.level, event.message) for event in outcome.told(Logged) if event.role == "source"]
    place = f"{tmp_path}/held.jsonl:1 and {tmp_path}/written.jsonl:2"
    assert said == [("warning", f"eval set held: 1 of 2 tasks are also in data.train: {place}")]
    with pytest.raises(ExceptionGroup) as raised:
        simulation(tmp_path, "sft", steps=2, eval={**table, "max_overlap": 0.4}).run()
    assert raised.group_contains(ConfigError, match=r"eval\.sets\.0\.path: got 1 of 2 tasks.*eval\.max_overlap = 0\.4")


def test_a_file_without_what_is_trained_ends_the_run_by_name(tmp_path: Path) -> None:
    run = simulation(tmp_path, "sft", steps=2)
    (tmp_path / "written.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(ExceptionGroup) as raised:
        run.run()
    assert raised.group_contains(ConfigError, match=r"written\.jsonl:1 without 'completion'")


class PluginActor(Role):
    """A trained role as a plugin writes it, from what `relax_core.roles` exports alone."""

    name, stateless = "actor", False

    async def run(self, context: Context) -> None:
        async with await RankGroup.start(context, self.name) as ranks:
            lease = TrainerDeviceLease(context, self.name, live=False)
            trainer, version = StepTrainer(context, ranks, self.name, lease), await context.bus.version()
            while version.step < context.config.steps:
                async with lease:
                    step = await trainer.step(version, StepTimes(context.clock))
                    assert step is not None
                    version = await context.bus.trained(step.claims, version.step, step.without_gradient)
                await context.run_status.emit(StepFinished(version.step, {"updates": float(len(step.results))}))


@pytest.mark.parametrize("placement", ["colocate", "async"])
def test_a_role_of_a_plugin_trains_steps_with_the_public_step_trainer(tmp_path: Path, placement: str) -> None:
    run = simulation(tmp_path, "sft", steps=4, placement=placement, batch={"updates_per_step": 2})
    run.plugin_roles["actor"] = PluginActor()
    outcome = run.run()
    assert [step.step for step in outcome.steps] == [1, 2, 3, 4] and set(outcome.metric("updates")) == {2.0}
    assert outcome.account.balanced and outcome.account.trained == 4 * 4 == outcome.account.issued
    assert len(outcome.of("actor-rank", "finish_update")) == 4 * 2


def test_a_held_out_loss_is_the_mean_over_what_the_algorithm_counts_itself() -> None:
    """A denominator of the algorithm's own is 1 until the end of an update, and an evaluation has just one batch."""
    import numpy as np
    import torch

    from relax_core.api import Algorithm, Loss, Term
    from relax_core.api.algorithm import LOG_PROBS, LossBatch, Output, PolicyOutputs
    from relax_core.api.batch import Ragged
    from relax_core.roles.source import _measures
    from relax_core.testing.trainer import make_rows

    class Counted(Algorithm):
        def outputs(self) -> frozenset[Output]:
            return frozenset({LOG_PROBS})

        def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
            kept = batch.loss_mask & (policy.log_probs > -2.0)
            counts = {"kept": kept.sum()}
            value = torch.where(kept, policy.log_probs, 0.0)
            told = {"counted/kept": (kept.sum(), torch.tensor(1.0))}
            return Loss({"nll": Term(value, -1.0, "kept")}, told, counts)

    rows = make_rows()
    mask = rows.columns["loss_mask"].values == 1
    values = np.linspace(-4.0, -0.5, len(mask)).astype(np.float32)
    kept = values[mask & (values > -2.0)]
    given = rows.with_columns({"log_probs": Ragged(values, rows.columns["tokens"].lengths)})
    found = _measures(Counted(), given)
    assert found == {"loss": pytest.approx(-kept.mean(), rel=1e-5), "kept": float(len(kept))}
