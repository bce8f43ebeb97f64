# SPDX-License-Identifier: Apache-2.0
"""What the sink refuses before a run starts. These tests need no ClearML."""

import pytest
from relax_plugin_clearml.sink import ClearML

from relax_core.api import ConfigError


def test_a_missing_package_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setattr("relax_plugin_clearml.sink.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"without the package .*pip install 'relax-plugin-clearml\[clearml\]'"):
        ClearML().check()
