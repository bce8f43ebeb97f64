# SPDX-License-Identifier: Apache-2.0
"""`relax plugins publish`: what blocks the upload of a plugin project, and what is built."""

import json
import shutil
import zipfile

import pytest
from packaging.metadata import parse_email
from relax_plugin_authoring.new_project import bake
from relax_plugin_authoring.publish import check_metadata, check_wheel, invalid_fields, publish
from typer.testing import CliRunner

from relax_core.api import ConfigError
from relax_core.cli.main import app

METADATA = """\
Metadata-Version: 2.4
Name: relax-plugin-fake
Version: 0.1.0
Summary: A fake
License-Expression: Apache-2.0
Classifier: Programming Language :: Python :: 3
Project-URL: Source, https://example.org/fake
Requires-Python: >=3.11
Requires-Dist: relax-core<0.2,>=0.1
Description-Content-Type: text/markdown

# relax-plugin-fake
"""
POINTS = {"relax-plugin-fake": "relax_plugin_fake.plugin"}


def found(text, points=POINTS):
    """Return (field, blocks) of each finding in this metadata."""
    raw, unknown = parse_email(text)
    findings = [*invalid_fields(text.encode(), unknown), *check_metadata(raw, points)]
    return [(finding.field, finding.blocks) for finding in findings]


def test_complete_metadata_have_no_finding():
    assert found(METADATA) == []


@pytest.mark.parametrize(
    ("old", "new", "field", "blocks"),
    [
        ("Name: relax-plugin-fake", "Name: fake", "name", False),
        ("Version: 0.1.0", "Version: 0.0.0", "version", True),
        ("Version: 0.1.0", "Version: 0.1.0+mine", "version", True),
        ("Version: 0.1.0", "Version: one", "version", True),
        ("Summary: A fake\n", "", "description", True),
        ("# relax-plugin-fake\n", "", "readme", True),
        ("License-Expression: Apache-2.0\n", "", "license", True),
        ("License-Expression: Apache-2.0", "License-Expression: Mine", "license-expression", True),
        ("Programming Language :: Python :: 3", "Private :: Do Not Upload", "classifiers", True),
        ("Classifier: Programming Language :: Python :: 3\n", "", "classifiers", False),
        ("Project-URL: Source, https://example.org/fake\n", "", "urls", False),
        ("Requires-Python: >=3.11\n", "", "requires-python", True),
        ("relax-core<0.2,>=0.1", "relax-core", "dependencies", True),
        ("Requires-Python:", "Requires-Dist: x @ https://example.org/x.whl\nRequires-Python:", "dependencies", True),
        ("Summary:", "Colour: red\nSummary:", "colour", True),
    ],
)
def test_a_fault_of_the_metadata_is_the_only_finding(old, new, field, blocks):
    assert old in METADATA
    assert found(METADATA.replace(old, new)) == [(field, blocks)]


def test_a_plugin_without_an_entry_point_is_refused_with_the_lines_to_add():
    raw, _ = parse_email(METADATA)
    (finding,) = check_metadata(raw, {})
    assert finding.blocks and str(finding).endswith(
        'add [project.entry-points."relax.plugins"] with relax-plugin-fake = "PACKAGE.plugin"'
    )


def wheel(path, code, more=()):
    """Write a wheel of relax-plugin-fake with this module of components."""
    files = {
        "relax_plugin_fake/__init__.py": "", "relax_plugin_fake/plugin.py": code,
        "relax_plugin_fake-0.1.0.dist-info/METADATA": METADATA,
        "relax_plugin_fake-0.1.0.dist-info/entry_points.txt":
            "[relax.plugins]\nrelax-plugin-fake = relax_plugin_fake.plugin\n",
        **dict.fromkeys(more, ""),
    }  # fmt: skip
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


OFFERS = (
    "from relax_core.api import Component, hook\n@hook\ndef relax_rewards():\n    return [Component('x', '{}:X', '')]\n"
)


@pytest.mark.process
def test_a_component_that_the_wheel_lacks_is_refused_and_so_are_packages_of_tests(tmp_path):
    built = wheel(tmp_path / "fake.whl", OFFERS.format("relax_plugin_fake.absent"), ["tests/test_x.py"])
    packages, target = check_wheel(built, tmp_path / "unpacked")
    assert packages.field == "packages" and "tests" in packages.problem
    assert target.field == "reward x" and "relax_plugin_fake.absent" in target.problem


def test_a_folder_without_a_project_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"PROJECT: .*name a folder with a pyproject\.toml"):
        publish(tmp_path, dry_run=True)


@pytest.mark.process
def test_a_baked_project_is_built_and_its_files_are_kept_only_without_dry_run(tmp_path):
    project = bake("reward", "mine", tmp_path)
    toml = project / "pyproject.toml"
    whole = toml.read_text()
    toml.write_text(whole.replace('license = "Apache-2.0"\n', ""))
    words = ["plugins", "publish", str(project), "--no-isolation", "--json"]
    refused = CliRunner().invoke(app, [*words, "--dry-run"])
    blocking = [one["field"] for one in json.loads(refused.stdout)["findings"] if one["blocks"]]
    assert (refused.exit_code, blocking) == (3, ["license"])
    toml.write_text(whole)
    kept = CliRunner().invoke(app, words)
    document = json.loads(kept.stdout)
    assert (kept.exit_code, document["ready"]) == (0, True)
    assert document["files"] == [
        str(project / "dist" / name)
        for name in ("relax_plugin_mine-0.1.0.tar.gz", "relax_plugin_mine-0.1.0-py3-none-any.whl")
    ]
    assert all((project / "dist" / name).is_file() for name in document["files"])
    assert "twine upload" in kept.stderr
    shutil.rmtree(project / "dist")
    toml.write_text(toml.read_text().replace("hatchling.build", "hatchling.absent"))
    broken = CliRunner().invoke(app, [*words, "--dry-run"])
    (finding,) = json.loads(broken.stdout)["findings"]
    assert (broken.exit_code, finding["field"]) == (3, "build") and "hatchling.absent" in finding["problem"]
    assert not (project / "dist").exists()
