# SPDX-License-Identifier: Apache-2.0
"""A whole run written by the recorder itself, with the numbers of a small GRPO run."""

import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from relax_core.api.events import (
    EvalFinished,
    RoleFailed,
    RoleRecovered,
    RolloutMeasured,
    RunFinished,
    RunStarted,
    SamplesScored,
    StepFinished,
    WeightsPublished,
)
from relax_core.api.role import Heartbeat, Wait
from relax_core.api.weights import Version
from relax_core.observe.recorder import Recorder
from relax_core.observe.run_directory import RunDirectory
from tests.clocks import HandClock

CONFIG = 'steps = 120\nalgorithm = "grpo"\n[model]\npath = "models/tiny"\n'


def curve(step: int) -> float:
    return 0.3 + 0.5 / (1 + math.exp(-(step - 60) / 15))


def samples(step: int, random: Random, extra: str = "") -> tuple[dict[str, object], ...]:
    return tuple(
        {
            "task_id": f"add-{step}-{at}",
            "group_id": step * 8 + at // 4,
            "sample_index": at % 4,
            "attempt": 0,
            "messages": [{"role": "user", "content": f"What is {step} + {at}?{extra}"}],
            "response": f"Let me add.\n{step} + {at} = {step + at if random.random() < curve(step) else step}",
            "answer": str(step + at),
            "reward": float(random.random() < curve(step)),
            "rewards": {"maths": 1.0},
            "outcome": "finished",
            "num_tokens": 24,
        }
        for at in range(8)
    )


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def write_run(clock: HandClock) -> Callable[..., Path]:
    def write(
        root: Path, steps: int = 120, ending: str | None = "finished", extra: str = "", name: str = "maths"
    ) -> Path:
        random = Random(7)
        run_dir = RunDirectory.create(None, name, datetime(2026, 11, 20), random, root=root)
        run_dir.write_config(CONFIG)
        run_dir.write("provenance", {"git": {"commit": "0123abc", "dirty": True}, "hardware": {"cores": 2, "gpus": []}})
        recorder = Recorder(run_dir, clock=clock, wall=lambda: 1_800_000_000.0 + clock.at)
        clock.at += 12
        recorder.write(RunStarted(run_dir.name, str(run_dir.path), {"steps": 120}))
        for step in range(1, steps + 1):
            clock.at += 0.8
            lag = {
                f"lag/samples/{lag}": float(n)
                for lag, n in ((0, 40 if step == 1 else 12), (1, 28))
                if step > 1 or not lag
            }
            recorder.write(RolloutMeasured(step, {"length/mean": 24 + random.random(), "tokens/generated": 960.0}))
            recorder.write(SamplesScored(step, samples(step, random, extra)))
            metrics = {
                "reward/mean": min(max(curve(step) + random.gauss(0, 0.05), 0), 1),
                "lag/mean": 0.7, "lag/max": float(step > 1), "time/step_s": 0.8, "tokens/per_s": 1200.0 + 50 * random.random(),
                "train/loss": random.gauss(0, 0.01), "train/grad_norm": 0.5 + random.random(),
                "samples/issued": 40.0 * step + 48, "samples/trained": 40.0 * step - 8, "samples/no_gradient": 9.0 * step,
                "samples/dropped": 8.0, "samples/dropped/reward_timeout": 8.0, "samples/in_flight": 48.0,
            }  # fmt: skip
            recorder.write(StepFinished(step, metrics | lag))
            recorder.write(WeightsPublished(Version("policy", 0, step), 0.02, 1 << 20, ("engine-0",)))
            if step % 30 == 0:
                recorder.write(EvalFinished(step, "hold-out", curve(step), 64, 1.0, {"standard_error": 0.0625}))
            if step == 50:
                recorder.write(RoleFailed("rollout", "engine-0 ended with signal 9", 4, False))
                recorder.write(RoleRecovered("rollout", 3.4, "engine-0 loaded policy@0.50"))
        recorder.heartbeats(
            (
                Heartbeat(
                    "actor", "waiting", waits=(Wait("actor", "8 groups", "rollout", clock.at - 4, clock.at + 56),)
                ),
                Heartbeat("rollout", "busy", doing="generating 24 samples"),
            )
        )
        if ending:
            recorder.write(RunFinished(ending, {}))
        recorder.close()
        return run_dir.path

    return write
