# SPDX-License-Identifier: Apache-2.0
"""The reward suite passes what keeps its promises and fails what does not."""

import pytest

SUITE = """
import asyncio, os, random, time
from relax_core.api import BatchReward, GroupReward, Options, Reward, Score
from relax_core.testing.reward import RewardSuite

class Opts(Options):
    scale: float = 1.0
    '''How much it is worth.'''

{mine}

class TestMine(RewardSuite):
    component = Mine
    options = {{"scale": 2.0}}
    deadline_s = 10.0
"""


def reward(body: str, base: str = "Reward[Opts]") -> str:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return SUITE.format(mine=f"class Mine({base}):\n{lines}")


GOOD = {
    "plain": reward("def score(self, task, trajectory): return float(trajectory.response == task.answer)"),
    "async": reward("async def score(self, t, j):\n    await asyncio.sleep(0)\n    return Score(1.0, {'a': 2.0})"),
    "batch": reward("def score_batch(self, tasks, js): return [len(j.response) for j in js]", "BatchReward[Opts]"),
    "group": reward("async def score_group(self, task, js): return [0.5 for j in js]", "GroupReward[Opts]"),
    "prints": reward("def score(self, t, j):\n    print('noise'); os.write(1, b'noise')\n    return 1"),
}


@pytest.mark.parametrize("code", GOOD.values(), ids=GOOD)
def test_a_good_reward_conforms(outcomes, failures, code):
    result = outcomes(code)
    assert failures(result) == {}
    assert sum(told == "passed" for told in result.values()) >= 8


MUTANTS = {
    "wrong type": ("def score(self, t, j): return 'good'", "return a number or a Score"),
    "not finite": ("def score(self, t, j): return float('nan')", "scores are finite"),
    "blocking": ("def score(self, t, j): time.sleep(3600)", "blocks for ever"),
    "sleeping": ("async def score(self, t, j): await asyncio.sleep(3600)", "blocks for ever"),
    "random": ("def score(self, t, j): return random.random()", "gave another result"),
    "hash order": ("def score(self, t, j): return hash(j.response) % 97", "another process gave another result"),
    "crash": ("def score(self, t, j): os._exit(9)", "exit code 9"),
    "raises": ("def score(self, t, j): raise KeyError('weights')", "KeyError: 'weights'"),
    "stumbles": ("def score(self, t, j): return 1 / len(j.response)", "division by zero"),
    "writes": ("def score(self, t, j):\n    j.info['x'] = t.metadata['n'] = 1\n    return 1", "left_as_they_were"),
    "abstract": ("pass", "does not define score"),
}


@pytest.mark.parametrize(("body", "said"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_fails(outcomes, failures, body, said):
    failed = failures(outcomes(reward(body)))
    assert any(said in f"{name}: {told}" for name, told in failed.items()), failed


def test_a_reward_without_its_own_samples_is_not_blamed_for_the_default_ones(outcomes, failures):
    picky = reward("def score(self, t, j): return t.metadata['matrix'][0][0]")
    assert "KeyError" in str(failures(outcomes(picky)))
    assert failures(outcomes(picky + "    generic = True\n")) == {}


def test_an_option_with_the_name_of_a_key_of_the_core_is_told(outcomes, failures):
    taken = reward("def score(self, t, j): return self.options.memory_mb").replace("scale", "memory_mb")
    failed = failures(outcomes(taken))
    assert "['memory_mb']" in failed["test_no_option_has_the_name_of_a_key_of_the_core"]
