# SPDX-License-Identifier: Apache-2.0
"""A baked project builds as a wheel, installs beside the core's wheel, is found, conforms and passes its own tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.api import ConfigError, PluginError
from relax_core.plugins import Catalogue
from relax_core.plugins.templates import bake, template_of

ROOT = Path(__file__).parents[3]
KINDS = ("reward", "environment", "algorithm")
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


def run(*command: str, site: Path | None = None, cwd: Path | None = None) -> str:
    """Run a command that must succeed; `site` comes before everything installed."""
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(site or "")}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel(project: Path, directory: Path) -> Path:
    run("-m", "build", "--wheel", "--no-isolation", "-o", str(directory), str(project))
    return max(directory.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(ROOT, tmp_path_factory.mktemp("core"))


RELAX = ("-c", "from relax_core.cli.main import main; main()")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moved", [False, True], ids=["template", "from-file"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_baked_project_builds_installs_is_found_and_conforms(kind, moved, core_wheel, tmp_path):
    source = tmp_path / "longest.py"
    source.write_text(MOVED[kind])
    project = bake(kind, f"my-{kind}", tmp_path / "made", source if moved else None)
    site = tmp_path / "site"
    wheels = [str(core_wheel), str(wheel(project, tmp_path / "dist"))]
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), *wheels)

    listed = json.loads(run(*RELAX, "plugins", "list", "--kind", kind, "--json", site=site, cwd=tmp_path))
    record = next(plugin for plugin in listed["plugins"] if plugin["distribution"] == project.name)
    assert (record["state"], record["components"][0]["name"]) == ("ok", f"my-{kind}")
    checked = json.loads(run(*RELAX, "plugins", "check", f"my-{kind}", "--json", site=site, cwd=tmp_path))
    assert checked["failed"] == 0 and checked["passed"] > 10
    run("-m", "pytest", "-p", "no:cacheprovider", "tests", site=site, cwd=project)
    assert (site / "relax_core" / "templates" / kind / "cookiecutter.json").is_file()


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
    with pytest.raises(ConfigError, match="it exists"):
        bake("environment", "mine", tmp_path)


def test_a_kind_without_template_says_which_have_one(tmp_path):
    with pytest.raises(ConfigError, match="there is one for algorithm, reward, environment"):
        bake("engine", "mine", tmp_path)


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (MOVED["environment"], ConfigError, "one reward class"),
        (MOVED["reward"] + "class Other(Longest): pass\n", ConfigError, "one reward class"),
        ("1 / 0", PluginError, "division by zero"),
    ],
)
def test_a_file_that_is_no_plugin_of_the_kind_is_not_moved(code, error, said, tmp_path):
    source = tmp_path / "some.py"
    source.write_text(code)
    with pytest.raises(error, match=said):
        bake("reward", "mine", tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_is_a_plugin_of_its_kind_without_being_installed(kind, tmp_path):
    project = bake(kind, "mine", tmp_path)
    assert template_of(kind).is_dir()
    catalogue = Catalogue.load([str(project / "src" / "relax_plugin_mine" / f"{kind}.py")])
    assert catalogue.target(kind, kind).__name__ == "Mine"
