# SPDX-License-Identifier: Apache-2.0
"""Programs that know nothing of Relax play through whole runs: what they were answered is trained as it was sampled.

`tests/clients` trains agents that are written with client libraries, and the agents' plugin has functions as agents.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_contrib.recipes.guess_number.build import hint
from relax_core.views.run import open_run
from tests.graph.conftest import Relax

pytestmark = [pytest.mark.process, pytest.mark.one_process("engines")]  # its fork server loads torch once
SHORT = ("steps=2", "rollout.groups_per_step=2", "rollout.group_size=8", "eval.every=0")
TRAINED = 2 * 2 * 8
ASK = """
import json, os, urllib.request

def post(url, key, body):
    head = {"authorization": "Bearer " + key, "content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))

def ask(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, os.environ["OPENAI_API_KEY"], {"messages": messages})["choices"][0]["message"]["content"]

task = json.load(open(os.environ["RELAX_TASK"]))
said = [{"role": "user", "content": "?"}]
"""
PLAYER = ASK + """
for turn in range(4):
    guess = ask(said)
    if guess == task["answer"]:
        break
    letter = len(guess) == 1 and "a" <= guess <= "p"
    hint = "!" if not letter else "<" if task["answer"] < guess else ">"
    said += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
post(os.environ["RELAX_REPORT_URL"], os.environ["RELAX_REPORT_KEY"], {"reward": float(guess == task["answer"])})
"""  # fmt: skip
BOXED = ASK + """
assert "answer" not in task
for _ in range(2):
    guess = ask(said)
    said += [{"role": "assistant", "content": guess}, {"role": "user", "content": "<"}]
with open("guess", "w") as file:
    file.write(guess)
"""  # fmt: skip
JUDGE = """
import json, os
key = input()
task = json.load(open(os.environ["RELAX_TASK"]))
guess = open(os.environ["RELAX_WORK"] + "/guess").read()
print(json.dumps({"reward": 1.0 if guess == task["answer"] else 0.5 * (guess < task["answer"]), "key": key}))
"""


def play(train: Relax, game: Path, folder: Path, environment: str) -> list[dict[str, Any]]:
    """Train with an agent and return its games; tokens are trained with the log-probs that they were sampled with."""
    ran = train(
        game / "recipe.toml", *SHORT, f'environment={{name="agent", timeout_s=120, {environment}}}', "--run-dir", "run"
    )
    assert ran.code == 0, ran.err
    assert (ran.json["status"], ran.json["samples_trained"], ran.json["balanced"]) == ("finished", TRAINED, True)
    run = open_run(folder / "run")
    differences = run.metrics().column("train/rollout_log_prob_diff_lag0_max")
    assert differences and max(differences) < 1e-4, "the trainer sees the tokens that the engine sampled"
    games = [sample for step in run.sample_steps() for sample in run.samples(step)]
    assert len(games) >= TRAINED
    return games


def test_an_agent_is_trained_on_exactly_what_it_was_answered(train_here: Relax, game: Path, tmp_path: Path) -> None:
    player = tmp_path / "player.py"
    player.write_text(PLAYER)
    games = play(train_here, game, tmp_path, f'command=["{sys.executable}", "{player}"]')
    assert not [
        key for row in open_run(tmp_path / "run").metrics() for key in row if key.startswith("tokens/discarded/")
    ]
    assert {game["reward"] for game in games} == {0.0, 1.0}
    for one in games:
        assert one["reward"] == (one["response"] == one["answer"])
        said = one.get("messages", [])  # none where the first guess was right: prompt and response are all
        answers = [message["content"] for message in said if message["role"] == "assistant"]
        hints = [message["content"] for message in said if message["role"] == "user" and message["content"] != "?"]
        for guess, heard in zip(answers, hints, strict=False):
            letter = len(guess) == 1 and "a" <= guess <= "p"
            assert heard == (hint(one["answer"], guess) if letter else "!")


def test_an_agent_in_a_sandbox_is_trained_on_what_its_judge_says(train_here: Relax, game: Path, tmp_path: Path) -> None:
    """The agent reaches the policy and never the answer, which its judge has."""
    (tmp_path / "agent.py").write_text(BOXED)
    (tmp_path / "judge.py").write_text(JUDGE)
    games = play(train_here, game, tmp_path, (
        'sandbox=true, command=["python", "agent.py"], copies={"agent.py"="agent.py"}, '
        'judge=["python", "judge.py"], judge_copies={"judge.py"="judge.py"}'
    ))  # fmt: skip
    assert {0.0, 0.5} <= {game["reward"] for game in games}
    for one in games:
        right, below = one["response"] == one["answer"], one["response"] < one["answer"]
        assert one["reward"] == (1.0 if right else 0.5 * below)


REPEATS = ASK.replace('{"messages": messages}', '{"messages": messages, "temperature": 0.1}') + """
def turns(*texts):
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]

first = ask(turns("?"))
ask(turns("?", first, "<"))
ask(turns("?", "edited", "<"))
ask(turns("sub"))
"""  # fmt: skip


def test_a_try_shows_the_tree_of_an_agent_s_calls_and_why_it_branched(
    relax_here: Relax, game: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(REPEATS)
    asked = ("try", "agent", game / "recipe.toml", "rollout.group_size=2", "--tasks", "1")
    ran = relax_here(
        *asked, 'rewards=["exact"]', "environment={name=agent, reward=rewards}", "--", sys.executable, "agent.py"
    )
    assert ran.code == 0, ran.err
    assert "call 3 is rewritten: an answer in its history differs from the policy's answer" in ran.out
    assert "calls: 1 first, 1 continued, 1 rewritten, 1 new" in ran.out
    assert "the run's settings replace the client's: temperature" in ran.out
    told = json.loads(relax_here(*asked, "--json", "--", "no-such-program").out)
    assert [one["outcome"] for one in told] == ["environment_error"] * 2 and "no-such-program" in told[0]["error"]
    told = json.loads(relax_here(*asked, "--json", "--", sys.executable, "agent.py").out)
    assert "reported no reward" in told[0]["error"]
    for one in told:
        roots = [node for node in one["nodes"] if node["parent"] is None]
        assert [node["text"] for node in roots][-1].endswith("sub") or len(roots) == 3
        assert all(node["trained"] == (node["tokens"] if node["sampled"] else 0) for node in one["nodes"])
    refused = relax_here("try", game / "recipe.toml", "--", "agent.py")
    assert refused.code == 2 and "write relax try agent FILES -- PROGRAM" in refused.err
