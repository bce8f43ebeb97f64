# SPDX-License-Identifier: Apache-2.0
"""Parts of answers that several dialects share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from relax_core.api.task import ToolCall

COMMENT = ": keepalive\n"
"""Keep-alive comment in a stream. No empty line follows it, since some clients would then read an empty event."""


def sent_event(data: Mapping[str, Any], name: str = "") -> str:
    """Return a server-sent event. Its JSON is ASCII, since some clients also end lines at characters such as U+2028."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"


def arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def openai_error(message: str, kind: str, field: str | None) -> dict[str, Any]:
    """Return the body of an error in OpenAI's dialects."""
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}
