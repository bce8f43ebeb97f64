# SPDX-License-Identifier: Apache-2.0
"""What `relax new` writes and refuses; `tests/authors` takes the projects on to wheels, checks and runs."""

import tomllib
from pathlib import Path

import pytest
from relax_plugin_authoring.new_project import bake, template_of

from relax_core.api import ConfigError, PluginError
from relax_core.api.component import KINDS as ALL_KINDS
from relax_core.registry import Catalogue

ROOT = Path(__file__).parents[3]
KINDS = tuple(ALL_KINDS)
MOVED = {
    "reward": """
from relax_core.api import Reward
class Longest(Reward):
    '''Longer is "better".'''
    def score(self, task, trajectory):
        return float(len(trajectory.response))
""",
    "environment": """
from relax_core.api import Environment, Step
class Longest(Environment):
    async def reset(self, task, seed):
        return None
    async def step(self, action):
        return Step("more", done=len(action.text) > 3)
""",
    "algorithm": """
from relax_core import learn
from relax_core.api import Advantages, Algorithm, Loss, Term
class Longest(Algorithm):
    '''Plain policy gradient.'''
    def advantages(self, groups):
        return Advantages(learn.group_mean(groups.rewards, groups.valid))
    def loss(self, batch, policy):
        return Loss({"policy": Term(-policy.log_probs * batch.advantages)})
""",
}


def test_a_moved_file_keeps_its_code_and_takes_the_name_given(tmp_path):
    source = tmp_path / "longest.py"
    source.write_text(MOVED["reward"])
    project = bake("reward", "relax-plugin-length", tmp_path, source)
    package = project / "src" / "relax_plugin_length"
    assert project.name == "relax-plugin-length"
    assert (package / "reward.py").read_text() == MOVED["reward"]
    assert (
        '"relax_plugin_length.reward:Longest",\n            "Longer is \'better\'",'
        in (package / "plugin.py").read_text()
    )


@pytest.mark.parametrize("name", ["My Reward", "7up", "", "relax-plugin-", "a_b"])
def test_a_name_that_is_not_kebab_case_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="kebab-case"):
        bake("reward", name, tmp_path)


def test_an_existing_project_is_left_alone(tmp_path):
    bake("reward", "mine", tmp_path)
    with pytest.raises(ConfigError, match="this folder exists"):
        bake("environment", "mine", tmp_path)


@pytest.mark.parametrize(("spdx", "written"), [("mit or apache-2.0", "MIT OR Apache-2.0"), ("LicenseRef-Own",) * 2])
def test_the_license_is_the_authors_choice(spdx, written, tmp_path):
    project = tomllib.loads((bake("reward", "mine", tmp_path, spdx=spdx) / "pyproject.toml").read_text())["project"]
    assert project["license"] == written


def test_a_license_that_is_not_an_spdx_expression_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--license: got 'my own'.*write an SPDX expression"):
        bake("reward", "mine", tmp_path, spdx="my own")
    assert list(tmp_path.iterdir()) == []


def test_a_kind_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="kind: got 'optimizer'"):
        bake("optimizer", "mine", tmp_path)


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (MOVED["environment"], ConfigError, "one reward class"),
        (MOVED["reward"] + "class Other(Longest): pass\n", ConfigError, "one reward class"),
        ("1 / 0", PluginError, "division by zero"),
    ],
)
def test_a_file_that_is_not_a_plugin_of_the_kind_is_not_moved(code, error, said, tmp_path):
    source = tmp_path / "some.py"
    source.write_text(code)
    with pytest.raises(error, match=said):
        bake("reward", "mine", tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if ALL_KINDS[kind].base]
)  # a file offers classes, not functions
def test_a_template_is_a_plugin_of_its_kind_without_being_installed(kind, tmp_path):
    project = bake(kind, "mine", tmp_path)
    assert template_of(kind).is_dir()
    catalogue = Catalogue.load([str(project / "src" / "relax_plugin_mine" / f"{kind.replace('-', '_')}.py")])
    assert catalogue.target(kind, kind).__name__ == "Mine"


def test_a_project_of_a_command_has_one_entry_point_and_no_list_of_components(tmp_path):
    project = bake("command", "last-reward", tmp_path)
    points = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]
    entry = "last-reward | watch | Print the mean reward of the last steps of a run."
    assert points == {"relax.commands": {entry: "relax_plugin_last_reward.command:last_reward"}}
    made = {str(path.relative_to(project)) for path in project.rglob("*.py")}
    package = "src/relax_plugin_last_reward"
    assert made == {f"{package}/__init__.py", f"{package}/command.py", "tests/test_command.py"}
    (tmp_path / "one.py").write_text("")
    with pytest.raises(ConfigError, match="--from: .*only components move"):
        bake("command", "other", tmp_path, tmp_path / "one.py")


def test_the_worked_example_of_an_engine_is_as_short_as_the_guide_says(tmp_path):
    """`tests/authors` shows that the example conforms and trains."""
    lines = (bake("engine", "mine", tmp_path) / "src/relax_plugin_mine/engine.py").read_text().count("\n")
    assert lines < 150
    assert f"the worked example, {lines} lines" in (ROOT / "docs/engines.md").read_text()
