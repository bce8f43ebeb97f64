# SPDX-License-Identifier: Apache-2.0
"""`relax plugins list` and `relax plugins show` as a person types them."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from relax_core.api import ConfigError
from relax_core.cli.main import app


@pytest.fixture
def relax():
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_list_shows_what_is_broken_and_why(relax, half, site):
    half()
    site.install("fake-bad", "1 / 0")
    shown = relax("plugins", "list").stdout
    assert re.search(r"relax-plugin-media .*\n    part +relax_media_pipeline\n", shown)
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
