# SPDX-License-Identifier: Apache-2.0
"""What the sink refuses before a run starts. These tests need no SwanLab."""

import pytest
from relax_plugin_swanlab.sink import SwanLab, SwanLabOptions

from relax_core.api import ConfigError


def test_a_missing_package_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setattr("relax_plugin_swanlab.sink.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"without the package .*pip install 'relax-plugin-swanlab\[swanlab\]'"):
        SwanLab(SwanLabOptions(mode="offline")).check()


def test_online_without_a_key_is_refused_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_plugin_swanlab.sink.find_spec", lambda name: name)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path))
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"sinks\.swanlab: got no API key; run `swanlab login`"):
        SwanLab().check()
    SwanLab(SwanLabOptions(mode="offline")).check()
    (tmp_path / ".netrc").touch()
    SwanLab().check()
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("SWANLAB_API_KEY", "secret")
    SwanLab().check()
