# SPDX-License-Identifier: Apache-2.0
"""`relax plugins check` and `relax new` as a person types them."""

import importlib.util
import json
import sys

import pytest
from relax_plugin_authoring.check import SLOW, _no_suite, check
from typer.testing import CliRunner

from relax_core.api import PluginError
from relax_core.api.component import KINDS
from relax_core.cli.main import app
from relax_core.launch import Catalogue, selected


@pytest.fixture
def relax():
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


TWO = """
@hook
def relax_rewards():
    return [Component("half", "fake_two.reward:Half", "Half a point"), Component("chance", "fake_two.reward:Chance", "")]
"""
TWO_REWARDS = """
import random
from relax_core.api import Reward
class Half(Reward):
    def score(self, task, trajectory):
        return 0.5
class Chance(Reward):
    def score(self, task, trajectory):
        return random.random()
"""


@pytest.mark.process
def test_check_names_the_failing_check_and_ends_with_3(relax, site):
    site.install("fake-two", TWO, files={"reward.py": TWO_REWARDS})
    result = relax("plugins", "check", "fake-two", "--json")
    verdicts = {(check["subject"], check["name"]): check["verdict"] for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 3
    assert verdicts["reward chance", "the_same_input_gives_the_same_result"] == "failed"
    sound = [verdict for (subject, _), verdict in verdicts.items() if subject != "reward chance"]
    assert len(sound) > 10 and set(sound) == {"passed"}
    assert result.stderr.splitlines()[:3] == [
        "fake-two: import", "suite 1 of 2: reward half", "suite 2 of 2: reward chance",
    ]  # fmt: skip


@pytest.mark.process
def test_a_slow_suite_is_skipped_with_the_option_to_add(site, monkeypatch):
    site.install("fake-two", TWO, files={"reward.py": TWO_REWARDS})
    assert KINDS.keys() > SLOW > set()
    monkeypatch.setattr("relax_plugin_authoring.check.SLOW", {"reward"})
    catalogue = Catalogue.load()
    checks = list(check(catalogue, selected(catalogue, "fake-two"), slow=False))
    suites = {item.subject: (item.verdict, item.detail) for item in checks if item.name == "conformance"}
    skipped = ("skipped", "the suite of reward is slow; add --slow, or name the plugin")
    assert suites == {"reward half": skipped, "reward chance": skipped}


@pytest.mark.parametrize(("words", "slow"), [((), False), (("--slow",), True), (("fake-half",), True)])
def test_slow_suites_run_on_request_or_for_a_named_plugin(relax, half, monkeypatch, words, slow):
    half()
    asked = []
    monkeypatch.setattr("relax_plugin_authoring.check.check", lambda *of, slow, progress: asked.append(slow) or [])
    relax("plugins", "check", *words)
    assert asked == [slow]


def test_check_without_pytest_says_what_to_install(monkeypatch):
    def find_spec(name):
        assert not name.startswith("relax_core.testing"), "the test kit imports pytest"
        return None if name == "pytest" else sys

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert _no_suite("reward", False) == "pytest not installed: pip install 'relax-core[testing]'"


@pytest.mark.process
def test_check_fails_the_suite_whose_process_dies(relax, site):
    dies = "import os, sys\nif 'relax_plugin_authoring.report_lines' in sys.modules:\n    os._exit(7)\n"
    site.install("fake-two", TWO, files={"reward.py": dies + TWO_REWARDS})
    result = relax("plugins", "check", "fake-two", "--json")
    failed = [check for check in json.loads(result.stdout)["checks"] if check["verdict"] == "failed"]
    assert [(check["subject"], check["name"]) for check in failed] == [
        ("reward half", "conformance"), ("reward chance", "conformance"),
    ]  # fmt: skip
    assert failed[0]["detail"].startswith("the test process ended early")


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("1 / 0", "handshake"),
        ("import pydantic", "light_import"),
        ("@hook\ndef relax_rewards():\n    return [Component('x', 'fake_bad.nowhere:X', '')]", "target"),
    ],
)
def test_check_of_a_broken_plugin_fails_before_any_suite(relax, site, code, name):
    site.install("fake-bad", code)
    result = relax("plugins", "check", "fake-bad", "--json")
    failed = [check["name"] for check in json.loads(result.stdout)["checks"] if check["verdict"] == "failed"]
    assert (result.exit_code, failed) == (3, [name])


@pytest.mark.process
def test_check_fails_undocumented_options(relax, half):
    half()
    document = json.loads(relax("plugins", "check", "half", "--json").stdout)
    failed = [check for check in document["checks"] if check["verdict"] == "failed"]
    assert [(check["name"], check["detail"].partition(";")[0]) for check in failed] == [
        ("options", "undocumented: strictness")
    ]


def test_new_prints_the_project_and_what_comes_next(relax, tmp_path):
    result = relax("new", "reward", "mine", "--out", tmp_path)
    assert result.stdout.strip() == str(tmp_path / "relax-plugin-mine")
    assert "relax plugins check relax-plugin-mine" in result.stderr


def test_a_file_with_an_error_ends_as_a_plugin_fault(relax, site):
    error = relax("plugins", "check", site.write("bad.py", "1 / 0")).exception
    assert isinstance(error, PluginError) and error.exit_code == 3
