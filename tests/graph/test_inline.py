# SPDX-License-Identifier: Apache-2.0
"""The inline runner: a debugger stops in an author's code, and time stands still meanwhile."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest

from relax_core.runners.inline import LONGEST_PAUSE_S, CallingThread, DebuggerLoop
from tests.graph.conftest import SMALL, Relax, command, environment, survivors

EXACT = (*SMALL, "steps=3", "checkpoint.every=0", "deterministic=true", "max_staleness=0", "placement=colocate")
STOPPING = """
from relax_core.api import Environment, Observation, Reward, Step
from relax_plugin_policy_gradient.grpo import GRPO

def once(who, done=set()):
    return who not in done and not done.add(who)

class Even(Reward):
    '''An even length, and a debugger at the first answer.'''
    def score(self, task, trajectory):
        if once("reward"):
            breakpoint()
        return float(len(trajectory.response) % 2 == 0)

class Asks(Environment):
    '''One answer, and a debugger before the first question.'''
    async def reset(self, task, seed):
        if once("environment"):
            breakpoint()
        return None
    async def step(self, action):
        return Step(Observation(""), done=True)

class Stops(GRPO):
    '''GRPO, and a debugger in its first loss.'''
    def loss(self, batch, policy):
        if once("loss"):
            breakpoint()
        return super().loss(batch, policy)
"""
AT_A_STOP = """p 'said', once
!__import__('time').sleep(2)
c
"""


@pytest.mark.faults  # on a busy machine the debugger printed nothing once, and the cause is not known
def test_a_debugger_stops_in_reward_environment_and_loss(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(STOPPING)
    words = (
        tiny / "recipe.toml", *EXACT, 'plugins=["./stopping.py"]', 'rewards=[{name="even", timeout_s=1.0}]',
        'environment="asks"', 'algorithm="stops"', "--runner", "inline", "--run-dir", tmp_path / "stopped",
    )  # fmt: skip
    stopped = subprocess.run(
        command("train", *words), cwd=tmp_path, env=environment(), input=AT_A_STOP * 3, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    for place in ("score()", "reset()", "loss()"):
        assert f"stopping.py({_line(place)}){place}" in stopped.stdout
    assert stopped.stdout.count("('said', <function once") == 3
    summary = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert summary["samples_dropped"] == {}, "no deadline passed"
    assert survivors(tmp_path) == []


def _line(place: str) -> int:
    """The line behind the breakpoint of a method."""
    lines = STOPPING.splitlines()
    start = next(at for at, line in enumerate(lines) if f"def {place.removesuffix('()')}(" in line)
    return next(at for at in range(start, len(lines)) if "breakpoint()" in lines[at]) + 2


def test_more_than_one_rank_or_another_interpreter_is_refused(relax_here: Relax, tiny: Path) -> None:
    ran = relax_here(
        "train", tiny / "recipe.toml", *EXACT, "placement.actor.ranks=2", "--runner", "inline", "--run-dir", "run"
    )
    assert ran.code == 2
    assert "run.runner" in ran.err and "2 ranks" in ran.err


def test_the_clock_of_a_loop_stops_while_a_debugger_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    loop = DebuggerLoop()
    before = loop.time()
    now += 3600.0
    assert loop.time() - before == LONGEST_PAUSE_S
    now += 1.0
    assert loop.time() - before == LONGEST_PAUSE_S + 1.0
    with loop.held():
        now += 4.0
        assert loop.time() - before == LONGEST_PAUSE_S + 1.0
    assert loop.time() - before == LONGEST_PAUSE_S + 1.0
    loop.close()


def test_work_for_a_thread_runs_on_the_calling_thread() -> None:
    executor = CallingThread()
    assert executor.submit(threading.get_ident).result() == threading.get_ident()
    with pytest.raises(KeyError):
        executor.submit({}.__getitem__, "missing").result()
