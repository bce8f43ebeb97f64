# SPDX-License-Identifier: Apache-2.0
"""The environment keeps what every environment promises, however a turn becomes an action."""

from __future__ import annotations

import os
from typing import Any

import pytest

from relax_core.api import Action, Task
from relax_core.api.task import ToolCall
from relax_core.testing.environment import EnvironmentSuite

URL = os.environ.get("OPENENV_TEST_URL", "")
pytestmark = pytest.mark.usefixtures("served")


class TestJson(EnvironmentSuite):
    component = "openenv"
    options: dict[str, Any] = {"url": URL, "reset": {"word": "w"}}
    tasks = (Task("one", "Say it."), Task("two", "Say it.", metadata={"openenv": {"reset": {"word": "x"}, "seed": 3}}))
    turns = ('<action>{"message": "a"}</action>', "nothing", '{"message": "abc"}', '```json\n{"message": "b"}\n```', "")


class TestText(EnvironmentSuite):
    component = "openenv"
    options: dict[str, Any] = {
        "url": URL, "act": "text", "action": {"message": "{text}!"}, "after": "</think>",
        "show": "echoed", "seed_of": "task", "note_state": True,
    }  # fmt: skip
    tasks = (Task("one", "Say it."), Task("two", "Say it."))
    turns = ("</think>a", "b", "<think></think>c", "</think>d")


class TestTool(EnvironmentSuite):
    component = "openenv"
    options: dict[str, Any] = {"url": URL, "act": "tool", "tool": "say"}
    tasks = (Task("one", "Say it."), Task("two", "Say it."))
    turns = (
        Action("", (1,), (ToolCall("say", {"message": "a"}), ToolCall("say", {"message": "b"}))),
        "no call",
        Action("", (1,), (ToolCall("say", {"message": "a"}),)),
        Action("", (1,), (ToolCall("say", {"message": "abc"}),)),
    )
