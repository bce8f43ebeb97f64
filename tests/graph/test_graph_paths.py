# SPDX-License-Identifier: Apache-2.0
"""Paths of the graph that a plain run does not take: forward roles, several updates, many engines, other interpreters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from relax_core.api.errors import ConfigError
from relax_core.views.run import Metrics, open_run
from tests.graph.conftest import SMALL as STEP, Ran, Relax
from tests.graph.failing import failing_engine

pytestmark = pytest.mark.process

SMALL = (*STEP, "steps=3", "checkpoint.every=0")
SAMPLES = 3 * 4 * 4


def trained(ran: Ran, run: Path) -> Metrics:
    """The steps of a run that ended well, its samples accounted for."""
    assert ran.code == 0, ran.err
    assert (ran.json["status"], ran.json["samples_trained"]) == ("finished", SAMPLES)
    metrics = open_run(run).metrics()
    assert metrics.column("samples/balanced") == [1.0] * 3
    assert all(difference < 1e-4 for difference in metrics.column("train/rollout_log_prob_diff_lag0_max"))
    return metrics


def roles(ran: Ran) -> list[str]:
    assert ran.code == 0, ran.err
    return list(dict.fromkeys(operation["role"] for operation in json.loads(ran.out)))


SEVERAL = (
    "max_staleness=0", "batch.updates_per_step=2", "optimizer.lr=0.01", "algorithm.kl_coef=0.1",
    "algorithm.correction=truncate",
)  # fmt: skip


@pytest.mark.ray
@pytest.mark.faults
def test_every_role_with_several_updates_of_adapters_on_ray(
    relax: Relax, relax_here: Relax, tiny: Path, tmp_path: Path
) -> None:
    """Critic, reference and actor-fwd have devices of their own, and policy and critic learn adapters."""
    settings = (*SEVERAL, "algorithm=ppo", "placement=async", "model.lora.rank=4")
    graph = roles(relax_here("graph", tiny / "recipe.toml", *settings, "--format", "json"))
    assert set(graph) == {"rollout", "reference", "actor-fwd", "critic", "advantages", "actor"}
    run = tmp_path / "run"
    ran = relax("train", tiny / "recipe.toml", *SMALL, *settings, "checkpoint.every=3", "--runner", "ray", "--run-dir", run,
                "--json")  # fmt: skip
    metrics = trained(ran, run)
    assert all(ratio > 1.0 for ratio in metrics.column("policy/ratio_max")[1:])
    assert all(kl > 0 for kl in metrics.column("policy/ref_kl"))
    assert len(metrics.column("critic/loss")) == 3
    assert (run / "checkpoints/step-000003/critic.json").is_file()
    kept = {name for file in (run / "checkpoints/step-000003/critic").glob("*.safetensors") for name in load_file(file)}
    assert kept and all(".lora_" in name or "score" in name for name in kept)


def test_the_old_policy_is_the_same_on_actor_and_actor_fwd(train_here: Relax, tiny: Path, tmp_path: Path) -> None:
    """On-policy, both placements see the same samples; log-probs from another process must change nothing."""
    words = (tiny / "recipe.toml", *SMALL, *SEVERAL)
    ran = train_here(*words, "placement=async", "--run-dir", tmp_path / "async")
    async_metrics = trained(ran, tmp_path / "async")
    assert all(kl > 0 for kl in async_metrics.column("policy/ref_kl"))
    ran = train_here(*words, "placement=hybrid", "--run-dir", tmp_path / "run")
    hybrid_metrics = trained(ran, tmp_path / "run")
    for name in ("reward/mean", "train/loss", "train/grad_norm", "policy/ratio_max", "policy/ref_kl"):
        assert hybrid_metrics.column(name) == pytest.approx(async_metrics.column(name), rel=1e-4, abs=1e-5), name
    assert all(ratio > 1.001 for ratio in async_metrics.column("policy/ratio_max")[1:])


def wrapped(folder: Path, name: str) -> tuple[Path, Path]:
    """An interpreter that notes its use."""
    script, log = folder / name, folder / f"{name}.log"
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script, log


@pytest.mark.faults  # an engine dies, and its replacement starts a further interpreter
def test_live_deltas_reach_an_engine_and_its_replacement_in_interpreters_of_their_own(
    relax: Relax, tiny: Path, tmp_path: Path
) -> None:
    """Weights go from memory to memory. The engine dies, and the engine in its place gets the weights again."""
    engine, engine_log = wrapped(tmp_path, "engine-python")
    trainer, trainer_log = wrapped(tmp_path, "trainer-python")
    ran = relax(
        "train", tiny / "recipe.toml", *SMALL, "optimizer.lr=1e-3", "weights=collective", "weights.payload=delta",
        "weights.silence_s=10", *failing_engine(tmp_path / "marks"), f"engine.python={engine}", f"trainer.python={trainer}",
        "--runner", "local", "--run-dir", tmp_path / "run", "--json",
    )  # fmt: skip
    metrics = trained(ran, tmp_path / "run")
    assert ran.json["restarts"] == {"engine": 1} and ran.json["max_lag"] == 0
    assert not (tmp_path / "run" / "weights").exists() or list((tmp_path / "run" / "weights").iterdir()) == []
    assert len(engine_log.read_text().splitlines()) == 2
    assert len(trainer_log.read_text().splitlines()) == 1
    assert all(norm > 0 for norm in metrics.column("train/grad_norm")), "each version differs from the one before"


PLUGIN = '''
import json
from relax_core.api import Filter, Sink

class OddGroups(Filter):
    """Half of the groups."""
    def reject(self, task, attempts, trajectories, rewards):
        return "odd" if attempts[0].group % 2 else ""

class Lines(Sink):
    """A line a step."""
    def open(self, run_dir, name, config):
        self.file = open(f"{run_dir}/lines.jsonl", "a")
    def metrics(self, step, values):
        self.file.write(json.dumps({"step": step, **values}) + "\\n")
    def close(self):
        self.file.close()
'''


def test_a_file_of_components_and_tasks_rewards_and_observers_from_python(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import relax_core as relax

    monkeypatch.setenv("RELAX_RUNS", str(tmp_path / "runs"))
    (tmp_path / "mine.py").write_text(PLUGIN)
    (data,) = tiny.glob("*train*.jsonl")
    tasks = [json.loads(line) | {"bonus": 2.0} for line in data.read_text().splitlines()[:64]]
    events: list[Any] = []

    def brevity(task: Any, trajectory: Any) -> float:
        return 1.0 / (1 + len(trajectory.response))

    def like_trl(prompts: list[str], completions: list[str], bonus: list[float], **columns: Any) -> list[float]:
        assert len(prompts) == len(completions) == len(columns["answer"])
        return bonus

    layer = {"plugins": [str(tmp_path / "mine.py")], "filters": ["odd-groups"], "sinks": ["lines"]}
    run = relax.train(tiny / "recipe.toml", layer, tasks=tasks, rewards=[brevity, like_trl], observers=[events.append],
                      runner="inline", run_dir=tmp_path / "run", overrides=SMALL, show=False)  # fmt: skip
    assert run.summary()["status"] == "finished" and run.summary()["samples_trained"] == SAMPLES
    assert run.metrics().column("samples/dropped/filtered")[-1] >= 16
    samples = [sample for step in run.sample_steps() for sample in run.samples(step)]
    assert all(s["reward"] == pytest.approx(2.0 + 1.0 / (1 + len(s["response"]))) for s in samples)
    assert Path(run.config["data"]["train"]).parent == tmp_path / "runs" / "tasks"
    assert [type(event).__name__ for event in events if "Step" in type(event).__name__] == ["StepFinished"] * 3
    assert [type(event).__name__ for event in events[-2:]] == ["RunFinished", "RunClosed"]
    lines = [json.loads(line) for line in (tmp_path / "run/lines.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if "reward/mean" in line} == {1, 2, 3}

    assert (relax.export(run.path, tmp_path / "exported") / "model.safetensors").is_file(), "needs no reward"
    sets = {"eval": {"sets": [{"name": "mine", "path": run.config["data"]["train"], "size": 2}]}}
    result, _ = relax.evaluate(run.path, sets, rewards=[brevity, like_trl], out=tmp_path / "evaluated")
    assert all(reward > 2.0 for rewards in result.sets[0]["tasks"].values() for reward in rewards)
    with pytest.raises(ConfigError, match="'brevity'.*pass it again: rewards="):
        relax.evaluate(run.path, sets, out=tmp_path / "unrewarded")
