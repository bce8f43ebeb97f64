# SPDX-License-Identifier: Apache-2.0
"""The environment suite passes what keeps its promises and fails what does not."""

import pytest

SUITE = """
import asyncio, random, time
from relax_core.api import Environment, Observation, Step, Tool
from relax_core.testing.environment import EnvironmentSuite

class Mine(Environment):
{body}

class TestMine(EnvironmentSuite):
    component = Mine
    deadline_s = 10.0
"""
GUESS = """
@classmethod
async def open(cls, options): return {"opened": 1}
async def reset(self, task, seed):
    self.hidden, self.left = random.Random(seed).randint(0, 9), 2
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


def environment(body: str) -> str:
    return SUITE.format(body="\n".join(f"    {line}" for line in body.splitlines()))


@pytest.mark.parametrize("body", [GUESS, BRANCH], ids=["step", "run"])
def test_a_good_environment_conforms(outcomes, failures, body):
    result = outcomes(environment(body))
    assert failures(result) == {}
    assert sum(told == "passed" for told in result.values()) >= 9


MUTANTS = {
    "wrong type": (GUESS.replace("return Step(", "return tuple("), "TypeError"),
    "no step": (GUESS.replace("return Step(", "return str("), ""),
    "text done": (GUESS.replace("self.left == 0, 0.5", "'yes', 0.5"), "done is 'yes'"),
    "infinite": (GUESS.replace("0.5 if self.left == 0 else None", "float('inf')"), "it is finite"),
    "blocking": (GUESS.replace("self.left -= 1", "time.sleep(3600)"), "blocks for ever"),
    "random": (GUESS.replace("random.Random(seed)", "random"), "gave another result"),
    "shared state": (GUESS.replace("self.left", "type(self).left"), "keep a sample's state on self"),
    "close needs reset": (GUESS.replace("close(self): pass", "close(self): del self.hidden"), "before_reset"),
    "blocking call": (GUESS.replace("async def step", "def step"), "async def"),
    "writes nothing": ("pass", "write `reset` and `step`, or `run`"),
}


@pytest.mark.parametrize(("body", "said"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_fails(outcomes, failures, body, said):
    failed = failures(outcomes(environment(body)))
    assert failed
    assert any(said in f"{name}: {told}" for name, told in failed.items()), failed
