# SPDX-License-Identifier: Apache-2.0
"""Pieces of answers that more than one dialect writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from relax_core.api.task import ToolCall

COMMENT = ": keepalive\n"
"""A comment of a stream of events. It ends no event, because some clients read an event of a comment alone as an empty one."""


def sent_event(data: Mapping[str, Any], name: str = "") -> str:
    """A server-sent event. Its JSON is ASCII, because some clients also end lines at characters such as U+2028."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as the JSON text that clients parse."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def openai_error(message: str, kind: str, field: str | None) -> dict[str, Any]:
    """An error's body in both dialects of OpenAI."""
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}
