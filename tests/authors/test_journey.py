# SPDX-License-Identifier: Apache-2.0
"""An author's way, from `relax new` to a run that trains with the plugin by name; a user's machine all along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.authors.conftest import Home, ended

SHORT = ("steps=3", "rollout.prompts_per_step=4", "rollout.group_size=8", "eval.every=0", "run.runner=local")
FILES = {
    "reward": '''
"""Longer is better."""
from relax_core.api import Reward
class Longest(Reward):
    """Longer is "better"."""
    def score(self, task, trajectory):
        return float(len(trajectory.response))
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
CHOICE = {
    "reward": ("environment=single-turn", 'rewards=["{name}"]'),
    "environment": ("environment={name}",),
    "algorithm": ("algorithm={name}",),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FILES)
def test_a_new_project_builds_installs_is_found_conforms_and_trains(kind: str, home: Home, game: Path) -> None:
    (home.path / "mine.py").write_text(FILES[kind])
    names = [f"my-{kind}", f"moved-{kind}"]
    home.must("new", kind, names[0])
    home.must("new", kind, names[1], "--from", "mine.py")
    projects = [home.path / f"relax-plugin-{name}" for name in names]
    home.install(*(home.build(project) for project in projects))

    found = {plugin["distribution"]: plugin for plugin in home.must("plugins", "list", "--json").json["plugins"]}
    for name, project in zip(names, projects, strict=True):
        plugin = found[project.name]
        assert (plugin["state"], plugin["components"][0]["name"], plugin["editable"]) == ("ok", name, False)
        checked = home.must("plugins", "check", name, "--json").json
        assert checked["failed"] == 0 and checked["passed"] > 10
        trains(home, game, kind, name, project.name)
    own = ended([home.python, "-m", "pytest", "-p", "no:cacheprovider", "tests"], projects[0])
    assert own.code == 0, own.out


@pytest.mark.parametrize("kind", FILES)
def test_a_single_file_conforms_and_trains(kind: str, home: Home, game: Path) -> None:
    file = home.path / "my_own.py"
    file.write_text(FILES[kind])
    assert home.must("plugins", "check", "my_own.py", "--json").json["failed"] == 0
    trains(home, game, kind, "my-own", "my_own.py", f'plugins=["{file}"]')


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_workers_of_a_cluster_find_a_single_file(home: Home, game: Path) -> None:
    file = home.path / "my_own.py"
    file.write_text(FILES["environment"] + FILES["algorithm"].replace('"""REINFORCE', '_ = """REINFORCE'))
    chosen = (f'plugins=["{file}"]', "environment=vowels", "algorithm=plain", "run.runner=ray")
    summary, metrics = train(home, game, *chosen)
    assert summary["status"] == "finished"
    assert any(row.get("train/grad_norm", 0) > 0 for row in metrics)


def trains(home: Home, game: Path, kind: str, name: str, plugin: str, *more: str) -> None:
    """A few steps with the component by name: its rewards arrive, weights move, every sample is accounted for."""
    summary, metrics = train(home, game, *more, *(line.format(name=name) for line in CHOICE[kind]))
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("finished", 3, 96)
    assert [row["samples/balanced"] for row in metrics if "samples/balanced" in row] == [1, 1, 1]
    assert any(row.get("train/grad_norm", 0) > 0 for row in metrics)
    part = {"reward": f"reward/{name}", "environment": "reward/environment"}.get(kind, "reward/mean")
    assert any(row.get(part, 0) > 0 for row in metrics)
    used = json.loads((Path(summary["run_dir"]) / "plugins.json").read_text())
    assert plugin in json.dumps(used)


def train(home: Home, game: Path, *more: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = home.path / f"run-{len(list(home.path.glob('run-*')))}"
    done = home.must("train", game / "recipe.toml", *SHORT, *more, "--run-dir", run, "--json")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return done.json, [json.loads(line) for line in lines]
