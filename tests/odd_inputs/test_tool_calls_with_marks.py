# SPDX-License-Identifier: Apache-2.0
"""Marks of thoughts and calls inside quoted data are data, and no call is lost without an error."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_chat.tool_calls import FORMATS

from tests.chat.tool_templates import TOOLS

TURNS = tomllib.loads((Path(__file__).parent / "tool_calls.toml").read_text())["turns"]


@pytest.mark.parametrize("entry", TURNS, ids=[turn["name"] for turn in TURNS])
def test_marks_inside_quoted_data_are_data(entry: dict[str, Any]) -> None:
    words, calls, error = FORMATS[entry["format"]].parse(entry["text"], TOOLS, entry.get("thinking", False))
    assert [[call.name, dict(call.arguments)] for call in calls] == entry.get("calls", [])
    assert entry["error"] in error if "error" in entry else not error
    assert words == entry.get("words", words)
