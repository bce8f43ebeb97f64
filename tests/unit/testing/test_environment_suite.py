# SPDX-License-Identifier: Apache-2.0
"""The environment suite passes what keeps its promises and fails what does not."""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.one_process("suites of suites")]
SUITE = """
import asyncio, random, time
from relax_core.api import Environment, Observation, Step, Tool
from relax_core.testing.environment import EnvironmentSuite

class Mine(Environment):
{body}

class TestMine(EnvironmentSuite):
    component = Mine
    deadline_s = {deadline_s}
"""
GUESS = """
@classmethod
async def open(cls, options): return {"opened": 1}
async def reset(self, task, seed):
    self.hidden, self.left = random.Random(seed).randint(0, 10**12), 2
    return Observation(f"{task.id}: {self.shared['opened']}")
async def step(self, action):
    self.left -= 1
    return Step(f"not {action.text}, {self.hidden}", self.left == 0, 0.5 if self.left == 0 else None)
async def close(self): pass
"""
BRANCH = """
async def run(self, task, seed, session):
    one = session.fork()
    for branch in (session, one, one.restart('again')):
        action = await branch.generate()
        branch.observe(f"{action.text} of {task.id}")
    session.reward(1.0)
"""
GOOD = {"step": GUESS, "run": BRANCH}
MUTANTS = {
    "wrong type": (GUESS.replace("return Step(", "return tuple("), "TypeError"),
    "no step": (GUESS.replace("return Step(", "return str("), ""),
    "text done": (GUESS.replace("self.left == 0, 0.5", "'yes', 0.5"), "done is 'yes'"),
    "infinite": (GUESS.replace("0.5 if self.left == 0 else None", "float('inf')"), "must be a finite number"),
    "blocking": (GUESS.replace("self.left -= 1", "time.sleep(3600)"), "blocks for ever"),
    "random": (GUESS.replace("random.Random(seed)", "random"), "gave another result"),
    "shared state": (GUESS.replace("self.left", "type(self).left"), "keep a sample's state on self"),
    "close needs reset": (GUESS.replace("close(self): pass", "close(self): del self.hidden"), "before_reset"),
    "blocking call": (GUESS.replace("async def step", "def step"), "async def"),
    "writes nothing": ("pass", "neither `reset` and `step` nor `run`"),
}


def suite_files() -> dict[str, str]:
    codes = {name: environment(body) for name, body in GOOD.items()}
    for name, (body, said) in MUTANTS.items():
        codes[name] = environment(body, deadline_s=0.5 if said == "blocks for ever" else 300.0)
    return {f"{path(name)}.py": code for name, code in codes.items()}


def environment(body: str, deadline_s: float = 300.0) -> str:
    return SUITE.format(body="\n".join(f"    {line}" for line in body.splitlines()), deadline_s=deadline_s)


def path(name: str) -> str:
    return f"test_environment_{name.replace(' ', '_')}"


@pytest.mark.parametrize("name", GOOD)
def test_a_good_environment_conforms(outcomes, failures, name):
    assert failures(path(name)) == {}
    assert sum(told == "passed" for told in outcomes(path(name)).values()) >= 9


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(failures, name):
    failed, said = failures(path(name)), MUTANTS[name][1]
    assert failed
    assert any(said in f"{test}: {told}" for test, told in failed.items()), failed
