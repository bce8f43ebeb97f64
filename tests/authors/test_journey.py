# SPDX-License-Identifier: Apache-2.0
"""An author's way from `relax new` to a run that trains with the plugins by name, on a machine with wheels only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.authors.conftest import PROJECTS, Home, ended

pytestmark = [pytest.mark.process, pytest.mark.one_process("author")]
CHOICE = f"""
algorithm = "{PROJECTS["algorithm"]}"
engine = "{PROJECTS["engine"]}"
trainer = "{PROJECTS["trainer"]}"
environment = "{PROJECTS["environment"]}"
rewards = ["{PROJECTS["reward"]}", "half-right"]
sampler = "{PROJECTS["sampler"]}"
filters = [{{ name = "{PROJECTS["filter"]}", most = 9.0 }}]
sinks = ["{PROJECTS["sink"]}"]
source = "{PROJECTS["task-source"]}"
data.train = "tasks.toml"
eval = {{ every = 0, sets = [] }}
{PROJECTS["table"]} = {{ most_steps = 2 }}
run = {{ runner = "inline" }}
"""
SHORT = ("steps=2", "rollout.groups_per_step=4", "rollout.group_size=8")


def test_new_projects_are_found_with_their_components(author: Home) -> None:
    found = {plugin["distribution"]: plugin for plugin in author.must("plugins", "list", "--json").json["plugins"]}
    for kind, name in PROJECTS.items():
        plugin = found[f"relax-plugin-{name}"]
        assert (plugin["state"], plugin["editable"]) == ("ok", False)
        offered = [(component["kind"], component["name"]) for component in plugin["components"]]
        assert offered + [("command", command["name"]) for command in plugin["commands"]] == [(kind, name)]


def test_own_tests_of_new_projects_and_of_the_guide_pass(author: Home) -> None:
    """The tests that `relax new` writes, and the one that `docs/plugins.md` shows."""
    settings = author.project("reward") / "pyproject.toml"
    options = ("-p", "no:cacheprovider", "-c", settings, "--rootdir", author.path, "-rA")
    files = [*author.path.glob("relax-plugin-*/tests/test_*.py"), author.path / "test_half_right.py"]
    assert len(files) == len(PROJECTS) + 1
    done = ended([author.python, "-m", "pytest", *options, *files], author.path)
    assert done.code == 0, done.out
    assert {file.name for file in files if f"{file.name}::" not in done.out} == set()


def test_a_run_trains_with_installed_plugins_and_a_single_file_by_name(
    author: Home, game: Path, tmp_path: Path
) -> None:
    """Their rewards arrive, weights move, every sample is accounted for."""
    overlay, run = tmp_path / "mine.toml", tmp_path / "run"
    (tmp_path / "tasks.toml").write_text(
        "".join(f"[[tasks]]\nprompt = '?'\nanswer = '{letter}'\n" for letter in "abcdefgh")
    )
    overlay.write_text(f'plugins = ["{author.path}/half_right.py"]{CHOICE}')
    summary = author.must("train", game / "recipe.toml", overlay, *SHORT, "--run-dir", run, "--json").json
    steps = [row for row in open_run(run).metrics() if "reward/mean" in row]
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("finished", 2, 64)
    assert [step["samples/balanced"] for step in steps] == [1, 1]
    assert any(step["train/grad_norm"] > 0 for step in steps)
    for name in ("environment", PROJECTS["reward"], "half-right"):
        assert any(step.get(f"reward/{name}", 0) > 0 for step in steps), name
    assert f'name = "{PROJECTS["algorithm"]}"' in (run / "config.toml").read_text()
    assert f"[{PROJECTS['table']}]\nmost_steps = 2\n" in (run / "config.toml").read_text()
    (checks,) = open_run(run).first_steps().values()
    assert {check.name: check.state for check in checks}["some samples earn a reward"] == "ok"
    refused = ended([author.environment / "bin/relax", "plan", game / "recipe.toml", overlay, "steps=3"], tmp_path)
    assert refused.code == 2 and f"{PROJECTS['table']}.most_steps allows 2" in refused.err
    used = (run / "plugins.json").read_text()
    unused = {name for name in PROJECTS.values() if f"relax-plugin-{name}" not in used}
    assert unused == {PROJECTS["command"]}, "workers need no commands"
    rows = (run / f"{PROJECTS['sink']}.jsonl").read_text().splitlines()
    assert {json.loads(row)["step"] for row in rows} == {1, 2}
    assert "half_right.py" in used
    rewards = [step["reward/mean"] for step in steps]
    answer = author.must(PROJECTS["command"], run, "--json").json
    assert answer == {"run": "run", "steps": 2, "mean": pytest.approx(sum(rewards) / 2)}
