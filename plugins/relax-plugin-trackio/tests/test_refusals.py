# SPDX-License-Identifier: Apache-2.0
"""What the sink refuses before a run starts. These tests need no Trackio."""

import pytest
from relax_plugin_trackio.sink import Trackio, TrackioOptions

from relax_core.api import ConfigError


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("relax_plugin_trackio.sink.find_spec", lambda name: name)


def test_a_missing_package_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setattr("relax_plugin_trackio.sink.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"without the package .*pip install 'relax-plugin-trackio\[trackio\]'"):
        Trackio().check()


def test_a_server_needs_its_token(installed, monkeypatch):
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN", raising=False)
    server = Trackio(TrackioOptions(server="https://trackio.example"))
    with pytest.raises(ConfigError, match=r"sinks\.trackio\.server: got no write token; set TRACKIO_WRITE_TOKEN"):
        server.check()
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "secret")
    server.check()


def test_a_space_needs_an_account(installed, monkeypatch):
    space = Trackio(TrackioOptions(space="user/charts"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"sinks\.trackio\.space: got no account; run `hf auth login`"):
        space.check()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    space.check()


def test_a_server_and_a_space_exclude_each_other(installed):
    with pytest.raises(ConfigError, match="both server and space; choose one"):
        Trackio(TrackioOptions(server="https://trackio.example", space="user/charts")).check()
    Trackio().check()
