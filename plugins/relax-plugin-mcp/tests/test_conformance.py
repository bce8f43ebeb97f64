# SPDX-License-Identifier: Apache-2.0
"""The environment keeps what every environment promises, with servers of samples and servers that they share."""

from __future__ import annotations

from pathlib import Path

from relax_core.api import Action, Task
from relax_core.api.task import ToolCall
from relax_core.testing.environment import EnvironmentSuite

SERVER = ("python", str(Path(__file__).with_name("servers.py")), "plain")


class TestMcp(EnvironmentSuite):
    component = "mcp"
    options = {
        "servers": [
            {"name": "own", "command": SERVER},
            {"name": "shared", "command": SERVER, "per": "worker", "prefix": "s_"},
        ]
    }
    tasks = (Task("one", "Act."), Task("two", "Act."))
    turns = (
        Action("", (1,), (ToolCall("act", {}), ToolCall("s_act", {"loudly": True}))),
        Action("", (1,), (ToolCall("s_act", {}),)),
        "Done.",
    )
