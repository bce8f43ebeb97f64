# SPDX-License-Identifier: Apache-2.0
"""A multi-turn environment through a whole run: hints are read and never trained, its reward arrives, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_contrib.recipes.guess_number.build import hint
from relax_contrib.recipes.quickstart.model import EOS
from relax_core.views.run import open_run
from tests.graph.conftest import Relax

SHORT = ("steps=3", "rollout.groups_per_step=4", "rollout.group_size=8", "eval.every=0")
TRAINED = 3 * 4 * 8
COUNTING = f'''
"""REINFORCE that counts what follows the end of a turn: the environment said that."""
import torch
from relax_core import learn
from relax_core.api import Advantages, Algorithm, Loss, Term

class Counting(Algorithm):
    def advantages(self, groups):
        return Advantages(learn.group_mean(groups.rewards, groups.valid))

    def loss(self, batch, policy):
        heard, one = batch.column("tokens").roll(1) == {EOS}, torch.ones(())
        metrics = {{"game/heard": (heard.sum(), one), "game/heard_trained": ((heard & batch.loss_mask).sum(), one)}}
        return Loss({{"policy": Term(-policy.log_probs * batch.advantages)}}, metrics)
'''


def test_a_game_of_several_turns_trains_on_guesses_only(train_here: Relax, game: Path, tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "mine.toml").write_text('plugins = ["./counting.py"]\nalgorithm = "counting"\n')
    ran = train_here(game / "recipe.toml", "mine.toml", *SHORT, "--run-dir", "run")
    assert ran.code == 0, ran.err
    summary = ran.json
    assert (summary["status"], summary["samples_trained"]) == ("finished", TRAINED)
    assert summary["samples_issued"] == (
        TRAINED + sum(summary["samples_dropped"].values()) + summary["samples_in_flight"]
    )
    run = open_run(tmp_path / "run")
    steps = [row for row in run.metrics() if "reward/mean" in row]
    assert len(steps) == 3
    for row in steps:
        assert row["samples/balanced"] == 1
        assert row["game/heard"] > 0
        assert row["game/heard_trained"] == 0
        assert row["train/rollout_log_prob_diff_lag0_max"] < 1e-4
    games = [sample for step in run.sample_steps() for sample in run.samples(step)]
    assert len(games) >= TRAINED
    assert sum(row["tokens/trained"] for row in steps) <= sum(sample["num_tokens"] for sample in games)
    for sample in games:
        check(sample)
    assert any(len(sample.get("messages", ())) > 3 for sample in games)
    assert {sample["reward"] for sample in games} == {0.0, 1.0}


BY_TURN = """
from pathlib import Path
from relax_core import learn

def by_turn(groups):
    judged = groups.step_rewards.nansum(-1)[groups.valid]
    assert judged.equal(groups.rewards[groups.valid].to(judged.dtype))
    with Path(__file__).with_suffix(".seen").open("a") as seen:
        print(*groups.step_rewards.shape, file=seen)
    return learn.of_turns(groups.step_rewards + 1, groups)
"""


def test_a_function_of_the_user_credits_turns(train_here: Relax, game: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BY_TURN)
    (tmp_path / "mine.toml").write_text('algorithm = {name = "grpo", advantages = "mine.py:by_turn"}\n')
    words = (game / "recipe.toml", "mine.toml", *SHORT, "steps=1")
    ran = train_here(*words, "--run-dir", "run")
    assert ran.code == 0, ran.err
    (step,) = [row for row in open_run(tmp_path / "run").metrics() if "reward/mean" in row]
    assert step["train/grad_norm"] > 0
    seen = [line.split() for line in (tmp_path / "mine.seen").read_text().splitlines()]
    assert sum(int(groups) for groups, *_ in seen) >= 4 and all(samples == "8" for _, samples, _ in seen)
    (tmp_path / "mine.py").write_text("def another(groups): ...")
    refused = train_here(*words, "--run-dir", "other")
    assert refused.code == 2 and "algorithm.advantages: got" in refused.err and "no function 'by_turn'" in refused.err


def check(game: dict[str, Any]) -> None:
    """The hints are those of its secret, and its reward says whether the last guess was right."""
    assert game["reward"] == (game["response"] == game["answer"] and game["outcome"] == "finished")
    said = [message["content"] for message in game.get("messages", ())[1:]]
    for guess, heard in zip(said[::2], said[1::2], strict=False):
        letter = len(guess) == 1 and "a" <= guess <= "p"
        assert heard == (hint(game["answer"], guess) if letter else "!")
