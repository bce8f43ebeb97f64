# SPDX-License-Identifier: Apache-2.0
"""`relax plugins` and `relax new` as a person types them."""

import importlib.util
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from relax_core.api import ConfigError, PluginError
from relax_core.api.component import KINDS
from relax_core.cli.main import app
from relax_core.registry import Catalogue
from relax_core.registry.check import SLOW, _no_suite, check, records_named


@pytest.fixture
def relax():
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_list_shows_what_is_broken_and_why(relax, half, site):
    half()
    site.install("fake-bad", "1 / 0")
    shown = relax("plugins", "list").stdout
    assert "reward             half                 Half a point" in shown
    assert "fake-bad  1.0  broken" in shown and "ZeroDivisionError: division by zero" in shown


def test_list_of_a_kind_leaves_one_json_document(relax, half):
    half()
    document = json.loads(relax("plugins", "list", "--kind", "reward", "--json").stdout)
    kinds = {component["kind"] for plugin in document["plugins"] for component in plugin["components"]}
    assert kinds == {"reward"}
    assert "fake-half" in [plugin["distribution"] for plugin in document["plugins"]]


def test_show_reports_options_source_and_capabilities(relax, half):
    half()
    document = json.loads(relax("plugins", "show", "half", "--json").stdout)
    assert document["options"][0] == {
        "name": "scale", "type": "float", "required": False, "default": 1.0, "doc": "How much a half is worth.",
    }  # fmt: skip
    assert document["capabilities"] == {"needs_columns": []}
    assert document["source"].endswith("fake_half/reward.py:9")
    assert "scale: float = 1.0\n        How much" in relax("plugins", "show", "fake-half:half").stdout


def test_show_of_a_distribution_has_the_frames_of_what_broke_it(relax, site):
    site.install("fake-bad", "1 / 0")
    assert "plugin.py" in relax("plugins", "show", "fake-bad").stdout


def test_show_of_an_ambiguous_name_lists_its_meanings(relax, half):
    half("fake-a")
    half("fake-b")
    error = relax("plugins", "show", "half").exception
    assert isinstance(error, ConfigError) and "fake-a:half --kind reward" in str(error)


@pytest.mark.parametrize(
    ("name", "said"), [("hallf", "did you mean 'half'"), ("fsdp-xyz", "no plugin has this name; known names are")]
)
def test_show_of_an_unknown_name_says_what_to_do(relax, half, name, said):
    half()
    error = relax("plugins", "show", name).exception
    assert isinstance(error, ConfigError) and said in str(error)


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
    monkeypatch.setattr("relax_core.registry.check.SLOW", {"reward"})
    catalogue = Catalogue.load()
    checks = list(check(catalogue, records_named(catalogue, "fake-two"), slow=False))
    suites = {item.subject: (item.verdict, item.detail) for item in checks if item.name == "conformance"}
    skipped = ("skipped", "the suite of reward is slow; add --slow, or name the plugin")
    assert suites == {"reward half": skipped, "reward chance": skipped}


@pytest.mark.parametrize(("words", "slow"), [((), False), (("--slow",), True), (("fake-half",), True)])
def test_slow_suites_run_on_request_or_for_a_named_plugin(relax, half, monkeypatch, words, slow):
    half()
    asked = []
    monkeypatch.setattr("relax_core.registry.check.check", lambda *of, slow, progress: asked.append(slow) or [])
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
    dies = "import os, sys\nif 'relax_core.testing.report_lines' in sys.modules:\n    os._exit(7)\n"
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


LISTING = """
import sys
from relax_core.cli import main
sys.argv = ["relax", "plugins", "list", "--kind", "reward", "--json"]
try:
    main.main()
finally:
    heavy = {"torch", "ray", "pydantic", "numpy", "transformers", "structlog"}
    print("heavy:", *sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.process
def test_listing_from_the_command_line_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, timeout=600, check=False)
    assert done.stderr.splitlines()[-1].strip() == "heavy:", done.stderr
    assert "exact" in done.stdout and json.loads(done.stdout)["schema"] == 1
    assert done.returncode == 0
