# SPDX-License-Identifier: Apache-2.0
"""Where a run came from, and what is kept out of it."""

import json
import platform
import subprocess

from relax_core.observe.provenance import git_state, provenance


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_a_repository_gives_its_commit_and_whether_it_is_dirty(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "a.txt").write_text("1")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-m", "x")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "a.txt").write_text("2")
    assert git_state(tmp_path) == {**clean, "dirty": True}


def test_outside_a_repository_there_is_no_git_state(tmp_path):
    assert git_state(tmp_path) is None


def test_packages_and_hardware_are_there_and_the_environment_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "value-of-an-environment-variable")
    found = provenance(tmp_path, ["train", "quickstart"])
    text = json.dumps(found)
    assert "relax-core" in found["packages"] and found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 0 and found["arguments"] == ["train", "quickstart"]
    assert "value-of-an-environment-variable" not in text
    assert platform.node() not in json.dumps(found["hardware"])
