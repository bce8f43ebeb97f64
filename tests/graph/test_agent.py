# SPDX-License-Identifier: Apache-2.0
"""A program that knows nothing of Relax plays through a whole run: what it was answered is trained as it was sampled."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from relax_contrib.recipes.guess_number.build import hint
from relax_core.views.run import open_run
from tests.graph.conftest import Relax

pytestmark = pytest.mark.process
SHORT = ("steps=2", "rollout.groups_per_step=2", "rollout.group_size=8", "eval.every=0")
TRAINED = 2 * 2 * 8
PLAYER = '''
import json, os, urllib.request

def hint(secret, guess):
    letter = len(guess) == 1 and "a" <= guess <= "p"
    return "=" if guess == secret else "!" if not letter else "<" if secret < guess else ">"

def play(secret, ask):
    messages, guess = [{"role": "user", "content": "?"}], None
    for turn in range(4):
        guess = ask(messages, turn)
        if guess == secret:
            break
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint(secret, guess)}]
    return float(guess == secret)

def chat(client, messages):
    answer = client.chat.completions.create(model="policy", messages=messages, temperature=0.1)
    return answer.choices[0].message.content

def said(client, messages):
    with client.messages.stream(model="policy", max_tokens=2, messages=messages) as stream:
        return "".join(stream.text_stream)

def solve(task, model):
    """Chat completions and Anthropic's messages take turns."""
    import anthropic, openai

    one = openai.OpenAI(base_url=model.openai_url, api_key=model.key)
    other = anthropic.Anthropic(base_url=model.url, api_key=model.key)
    return play(task.answer, lambda messages, turn: said(other, messages) if turn % 2 else chat(one, messages))

def post(url, key, body):
    head = {"authorization": "Bearer " + key, "content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))

def main():
    """In plain HTTP, as any language has it."""
    env, task = os.environ, json.load(open(os.environ["RELAX_TASK"]))
    def ask(messages, turn):
        url = env["OPENAI_BASE_URL"] + "/chat/completions"
        return post(url, env["OPENAI_API_KEY"], {"messages": messages})["choices"][0]["message"]["content"]
    post(env["RELAX_REPORT_URL"], env["RELAX_REPORT_KEY"], {"reward": play(task["answer"], ask)})

if __name__ == "__main__":
    main()
'''


@pytest.mark.parametrize("how", ["function", "command"])
def test_an_agent_is_trained_on_exactly_what_it_was_answered(
    relax: Relax, train_here: Relax, game: Path, tmp_path: Path, how: str
) -> None:
    player = tmp_path / "player.py"
    player.write_text(PLAYER)
    played = f'function="{player}:solve"' if how == "function" else f'command=["{sys.executable}", "{player}"]'
    environment = f'environment={{name="agent", timeout_s=120, {played}}}'
    words = (game / "recipe.toml", *SHORT, environment, "--run-dir", "run")
    # The inline runner has one thread, and a function that waits for the policy would block it.
    ran = relax("train", *words, "--runner", "local", "--json") if how == "function" else train_here(*words)
    assert ran.code == 0, ran.err
    summary = ran.json
    assert (summary["status"], summary["samples_trained"], summary["balanced"]) == ("finished", TRAINED, True)
    run = open_run(tmp_path / "run")
    steps = [row for row in run.metrics() if "reward/mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["train/rollout_log_prob_diff_lag0_max"] < 1e-4, "the trainer sees the tokens that the engine sampled"
        assert not [key for key in row if key.startswith("tokens/discarded/")], "every answer was read"
    games = [sample for step in run.sample_steps() for sample in run.samples(step)]
    assert len(games) >= TRAINED and {game["reward"] for game in games} == {0.0, 1.0}
    for one in games:
        assert one["reward"] == (one["response"] == one["answer"])
        said = one.get("messages", [])  # none where the first guess was right: prompt and response are all
        answers = [message["content"] for message in said if message["role"] == "assistant"]
        hints = [message["content"] for message in said if message["role"] == "user" and message["content"] != "?"]
        for guess, heard in zip(answers, hints, strict=False):
            letter = len(guess) == 1 and "a" <= guess <= "p"
            assert heard == (hint(one["answer"], guess) if letter else "!")


REPEATS = """
import json, os, urllib.request
env = os.environ
def ask(*messages):
    body = {"messages": [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(messages)],
            "temperature": 0.1}
    request = urllib.request.Request(env["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"authorization": "Bearer " + env["OPENAI_API_KEY"], "content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
first = ask("?")
ask("?", first, "<")
ask("?", "edited", "<")
ask("sub")
"""


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
