# SPDX-License-Identifier: Apache-2.0
"""One file named in the configuration is a plugin."""

import pytest

from relax_core.api import Chosen, ConfigError, InfrastructureError, PluginError
from relax_core.registry import Catalogue

ONE = """
    from dataclasses import dataclass
    from relax_core.api import Options, Reward
    class Opts(Options):
        scale: float = 1.0
    @dataclass
    class Note:
        text: str
    class _Base(Reward[Opts]):
        pass
    class Longest(_Base):
        '''Longer is better.

        Really.'''
        def score(self, task, trajectory):
            return self.options.scale
"""


def load(*files) -> Catalogue:
    return Catalogue.load([str(f) for f in files], environ={})


def test_a_single_class_is_named_after_its_file(site):
    catalogue = load(site.write("my_reward.py", ONE))
    assert catalogue.build(Chosen("reward", "my-reward", {"scale": 4.0})).score(None, None) == 4.0
    found = catalogue.find("reward", "my-reward")
    assert found.component.help == "Longer is better."
    assert found.distribution == "my_reward.py" and found.location.endswith("site/my_reward.py")
    assert catalogue.find("reward", "my_reward.py:my-reward") == found


def test_several_classes_are_named_by_class(site):
    code = (
        ONE
        + """
    from relax_core.api import Environment
    class HTTPScore(Longest):
        pass
    class Maze(Environment):
        pass
"""
    )
    catalogue = load(site.write("several.py", code))
    assert {"longest", "http-score"} <= set(catalogue.names("reward"))
    assert "maze" in catalogue.names("environment")
    assert "several" not in catalogue.names("reward")


def test_a_file_may_define_hooks_instead(site):
    hooked = ONE + (
        "\n    from relax_core.api import Component, hook\n    @hook\n    def relax_rewards():\n"
        "        return [Component('best', __name__ + ':Longest', '')]\n"
        "    @hook\n    def relax_run_started(event): ...\n"
    )
    catalogue = load(site.write("hooked.py", hooked))
    record = catalogue.records[-1]
    assert [c.name for _, c in record.components] == ["best"] and record.hooks == ("relax_run_started",)
    assert catalogue.target("reward", "best").__name__ == "Longest"


@pytest.mark.parametrize("path", ["nowhere.py", "folder", "text.txt"])
def test_a_missing_file_is_a_configuration_error(site, path):
    (site.path / "folder").mkdir()
    site.write("text.txt", "")
    with pytest.raises(ConfigError, match="plugins: got .*existing .py file"):
        load(site.path / path)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\n1 / 0", r"division by zero.*\(.*bad\.py:2\)"),
        ("x = 1\nclass A(:", r"SyntaxError: .*\(.*bad\.py:2\)"),
        ("import json\njson.loads('[')", r"JSONDecodeError: .*\(.*bad\.py:2\)"),
        ("x = 1", "no component class and no hook"),
        ("from relax_core.api import Reward\nclass A(Reward): pass", "no component class and no hook"),
        ("def relax_rewards(): return []", "put @hook"),
    ],
)
def test_a_broken_file_is_raised_because_the_configuration_needs_it(site, code, said):
    path = site.write("bad.py", code)
    with pytest.raises(PluginError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 3


def test_two_files_of_one_name_are_two_plugins(site):
    catalogue = load(site.write("a/same.py", ONE), site.write("b/same.py", ONE))
    with pytest.raises(ConfigError, match="several plugins have this name"):
        catalogue.find("reward", "same")


def test_a_changed_file_no_longer_verifies(site):
    path = site.write("mine.py", ONE)
    want = load(path).resolved
    load(path).verify(want)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(InfrastructureError, match=r"mine.py differs on node .*: have content \w+, want content \w+"):
        load(path).verify(want)
