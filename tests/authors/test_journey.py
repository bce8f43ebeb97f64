# SPDX-License-Identifier: Apache-2.0
"""An author's way, from `relax new` to a run that trains with the plugin by name; a user's machine all along."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.authors.conftest import Home, ended

SHORT = ("steps=3", "rollout.prompts_per_step=4", "rollout.group_size=8", "eval.every=0", "run.runner=local")
FILES = {
    "reward": '''
"""One of the few."""
from relax_core.api import Reward
class Vowel(Reward):
    """A point for any "vowel"."""
    def score(self, task, trajectory):
        return float(any(c in "aeiou" for c in trajectory.response))
''',
    "environment": '''
"""Two turns, and a point for each vowel."""
from relax_core.api import Environment, Step
class Vowels(Environment):
    """A point for a turn with a vowel."""
    gives_reward = True
    async def reset(self, task, seed):
        self.turns = 0
    async def step(self, action):
        self.turns += 1
        return Step("more", done=self.turns == 2, reward=float(any(c in "aeiou" for c in action.text)))
''',
    "algorithm": '''
"""REINFORCE with the group's mean as baseline."""
from relax_core import learn
from relax_core.api import Advantages, Algorithm, Loss, Term
class Plain(Algorithm):
    """Plain policy gradient."""
    def advantages(self, groups):
        return Advantages(learn.group_mean(groups.rewards, groups.valid))
    def loss(self, batch, policy):
        return Loss({"policy": Term(-policy.log_probs * batch.advantages)})
''',
}
SOURCES = ("my", "moved")
"""One project of each kind keeps its template's code, the other one starts from a file of the author."""


@pytest.fixture(scope="module")
def author(own_home: Home) -> Home:
    """An author who has made, built and installed two projects of every kind."""
    projects = []
    for kind, code in FILES.items():
        (own_home.path / "mine.py").write_text(code)
        own_home.must("new", kind, f"my-{kind}")
        own_home.must("new", kind, f"moved-{kind}", "--from", "mine.py")
        projects += [own_home.path / f"relax-plugin-{source}-{kind}" for source in SOURCES]
    own_home.install(*(own_home.build(project) for project in projects))
    return own_home


@pytest.mark.xdist_group("author")
@pytest.mark.parametrize("kind", FILES)
def test_a_new_project_builds_installs_is_found_and_conforms(kind: str, author: Home, game: Path) -> None:
    found = {plugin["distribution"]: plugin for plugin in author.must("plugins", "list", "--json").json["plugins"]}
    for name in (f"{source}-{kind}" for source in SOURCES):
        plugin = found[f"relax-plugin-{name}"]
        assert (plugin["state"], plugin["components"][0]["name"], plugin["editable"]) == ("ok", name, False)
        checked = author.must("plugins", "check", name, "--json").json
        assert checked["failed"] == 0 and checked["passed"] > 10
    tried(author, game, kind, f"my-{kind}")
    own = ended(
        [author.python, "-m", "pytest", "-p", "no:cacheprovider", "tests"], author.path / f"relax-plugin-my-{kind}"
    )
    assert own.code == 0, own.out


@pytest.mark.xdist_group("author")
@pytest.mark.parametrize("source", SOURCES)
def test_new_projects_train_by_name(source: str, author: Home, game: Path) -> None:
    """One run uses the projects of all kinds."""
    choice = (f"environment={source}-environment", f'rewards=["{source}-reward"]', f"algorithm={source}-algorithm")
    rewards = ("reward/environment", f"reward/{source}-reward")
    trains(author, game, rewards, [f"relax-plugin-{source}-{kind}" for kind in FILES], *choice)


def tried(home: Home, game: Path, kind: str, name: str) -> None:
    """What the project's README says to try."""
    if kind == "reward":
        row = {"prompt": "Which city is the capital of France?", "answer": "Paris", "response": "Paris"}
        (home.path / "responses.jsonl").write_text(json.dumps(row) + "\n")
        assert "reward 1" in home.must("try", "reward", name, "--data", "responses.jsonl").out
    if kind == "environment":
        assert "reward" in home.must("try", game / "recipe.toml", f"environment={name}", "--tasks", "1").out


def test_a_single_file_named_in_the_configuration_conforms_and_trains(home: Home, game: Path) -> None:
    mine = single_file(home, "algorithm", "my_loss.py", 'algorithm = "my-loss"')
    assert home.must("plugins", "check", "my_loss.py", "--json").json["failed"] == 0
    trains(home, game, ["reward/mean"], ["my_loss.py"], mine)


def single_file(home: Home, kind: str, name: str, choice: str) -> Path:
    """The file, and a configuration beside it that names it."""
    (home.path / name).write_text(FILES[kind])
    overlay = home.path / "mine.toml"
    overlay.write_text(f'plugins = ["./{name}"]\n{choice}\n')
    return overlay


def trains(home: Home, game: Path, rewards: Sequence[str], plugins: Sequence[str], *more: str | Path) -> None:
    """A few steps with components by name: their rewards arrive, weights move, every sample is accounted for."""
    summary, metrics = train(home, game, *more)
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("finished", 3, 96)
    assert [row["samples/balanced"] for row in metrics if "samples/balanced" in row] == [1, 1, 1]
    assert any(row.get("train/grad_norm", 0) > 0 for row in metrics)
    for name in rewards:
        assert any(row.get(name, 0) > 0 for row in metrics), name
    used = json.loads((Path(summary["run_dir"]) / "plugins.json").read_text())
    for plugin in plugins:
        assert plugin in json.dumps(used)


def train(home: Home, game: Path, *more: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = home.path / f"run-{len(list(home.path.glob('run-*')))}"
    done = home.must("train", game / "recipe.toml", *SHORT, *more, "--run-dir", run, "--json")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return done.json, [record for record in records if "reward/mean" in record]
