# SPDX-License-Identifier: Apache-2.0
"""The reward suite passes what keeps its promises and fails what does not."""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.one_process("suites of suites")]
SUITE = """
import asyncio, atexit, os, random, threading, time
from relax_core.api import BatchReward, GroupReward, Options, Reward, Score
from relax_core.testing.reward import RewardSuite

class Opts(Options):
    scale: float = 1.0
    '''How much it is worth.'''

{mine}

class TestMine(RewardSuite):
    component = Mine
    options = {{"scale": 2.0}}
    deadline_s = {deadline_s}
"""


def reward(body: str, base: str = "Reward[Opts]", deadline_s: float = 300.0) -> str:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return SUITE.format(mine=f"class Mine({base}):\n{lines}", deadline_s=deadline_s)


GOOD = {
    "plain": reward("def score(self, task, trajectory): return float(trajectory.response == task.answer)"),
    "async": reward("async def score(self, t, j):\n    await asyncio.sleep(0)\n    return Score(1.0, {'a': 2.0})"),
    "batch": reward("def score_batch(self, tasks, js): return [len(j.response) for j in js]", "BatchReward[Opts]"),
    "group": reward("async def score_group(self, task, js): return [0.5 for j in js]", "GroupReward[Opts]"),
    "prints": reward("def score(self, t, j):\n    print('noise'); os.write(1, b'noise')\n    return 1"),
}
BLOCKS = "blocks for ever"
MUTANTS = {
    "wrong type": ("def score(self, t, j): return 'good'", "return a number or a Score"),
    "not finite": ("def score(self, t, j): return float('nan')", "scores must be finite"),
    "blocking": ("def score(self, t, j): time.sleep(3600)", BLOCKS),
    "sleeping": ("async def score(self, t, j): await asyncio.sleep(3600)", BLOCKS),
    "thread": (
        "def score(self, t, j):\n    threading.Thread(target=time.sleep, args=(3600,)).start()\n    return 1",
        BLOCKS,
    ),
    "exit": ("def score(self, t, j):\n    atexit.register(time.sleep, 3600)\n    return 1", BLOCKS),
    "random": ("def score(self, t, j): return random.random()", "gave another result"),
    "hash order": ("def score(self, t, j): return hash(j.response) % 97", "another process gave another result"),
    "crash": ("def score(self, t, j): os._exit(9)", "exit code 9"),
    "raises": ("def score(self, t, j): raise KeyError('weights')", "KeyError: 'weights'"),
    "stumbles": ("def score(self, t, j): return 1 / len(j.response)", "division by zero"),
    "writes": ("def score(self, t, j):\n    j.info['x'] = t.metadata['n'] = 1\n    return 1", "left_as_they_were"),
    "abstract": ("pass", "does not define score"),
}
PICKY = reward("def score(self, t, j): return t.metadata['matrix'][0][0]")
TAKEN = reward("def score(self, t, j): return self.options.memory_mb").replace("scale", "memory_mb")


def suite_files() -> dict[str, str]:
    codes = {**GOOD, "picky": PICKY, "picky generic": PICKY + "    generic = True\n", "taken": TAKEN}
    for name, (body, said) in MUTANTS.items():
        codes[name] = reward(body, deadline_s=0.5 if said == BLOCKS else 300.0)
    return {f"{path(name)}.py": code for name, code in codes.items()}


def path(name: str) -> str:
    return f"test_reward_{name.replace(' ', '_')}"


@pytest.mark.parametrize("name", GOOD)
def test_a_good_reward_conforms(outcomes, failures, name):
    assert failures(path(name)) == {}
    assert sum(told == "passed" for told in outcomes(path(name)).values()) >= 8


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(failures, name):
    failed, said = failures(path(name)), MUTANTS[name][1]
    assert any(said in f"{test}: {told}" for test, told in failed.items()), failed


def test_a_reward_without_its_own_samples_is_not_blamed_for_the_default_ones(failures):
    assert "KeyError" in str(failures(path("picky")))
    assert failures(path("picky generic")) == {}


def test_an_option_named_like_a_key_of_the_core_is_reported(failures):
    assert "['memory_mb']" in failures(path("taken"))["test_no_option_has_the_name_of_a_key_of_the_core"]
