# SPDX-License-Identifier: Apache-2.0
"""A program in a sandbox plays through a whole run, and a judge's program pays it: it reaches the policy, never the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.graph.conftest import Relax

pytestmark = pytest.mark.process
SHORT = ("steps=2", "rollout.groups_per_step=2", "rollout.group_size=8", "eval.every=0")
TRAINED = 2 * 2 * 8
AGENT = """
import json, os, urllib.request

def ask(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps({"messages": messages}).encode(), head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

task = json.load(open(os.environ["RELAX_TASK"]))
assert "answer" not in task
said = [{"role": "user", "content": task["prompt"][0]["content"]}]
for _ in range(2):
    guess = ask(said)
    said += [{"role": "assistant", "content": guess}, {"role": "user", "content": "<"}]
with open("guess", "w") as file:
    file.write(guess)
"""
JUDGE = """
import json, os
key = input()
task = json.load(open(os.environ["RELAX_TASK"]))
guess = open(os.environ["RELAX_WORK"] + "/guess").read()
print(json.dumps({"reward": 1.0 if guess == task["answer"] else 0.5 * (guess < task["answer"]), "key": key}))
"""


def test_an_agent_in_a_sandbox_is_trained_on_what_its_judge_says(train_here: Relax, game: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "judge.py").write_text(JUDGE)
    boxed = (
        'environment={name="agent", sandbox=true, timeout_s=120, command=["python", "agent.py"], '
        'copies={"agent.py"="agent.py"}, judge=["python", "judge.py"], judge_copies={"judge.py"="judge.py"}}'
    )
    ran = train_here(game / "recipe.toml", *SHORT, boxed, "--run-dir", "run")
    assert ran.code == 0, ran.err
    summary = ran.json
    assert (summary["status"], summary["samples_trained"], summary["balanced"]) == ("finished", TRAINED, True)
    run = open_run(tmp_path / "run")
    differences = [row.get("train/rollout_log_prob_diff_lag0_max") for row in run.metrics() if "reward/mean" in row]
    assert any(differences) and max(filter(None, differences)) < 1e-4, "the trainer sees the tokens that were sampled"
    games = [sample for step in run.sample_steps() for sample in run.samples(step)]
    assert len(games) >= TRAINED and {0.0, 0.5} <= {game["reward"] for game in games}
    for one in games:
        right, below = one["response"] == one["answer"], one["response"] < one["answer"]
        assert one["reward"] == (1.0 if right else 0.5 * below)
