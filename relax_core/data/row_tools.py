# SPDX-License-Identifier: Apache-2.0
"""The tools that a row of a task file describes in its column `tools`, for the chat template to show.

Only the prompt shows these tools. Calls of such tools stay in the policy's text, because no environment answers them.
"""

from __future__ import annotations

from typing import Any

from relax_core.api.environment import RowTool
from relax_core.data.plain_data import NotPlainError, plain, read_json
from relax_core.data.task_row import RowError, without_nulls

COLUMN = "tools"


def row_tools(value: object) -> tuple[RowTool, ...]:
    """Return the tools in a value of the column `tools`. Raises RowError for a description without a name.

    The value is a list of objects, or such a list as JSON text; text that only begins as one is refused. Any other
    value is an ordinary column without tools.
    """
    decoded = _decoded(value)
    if not isinstance(decoded, list):
        return ()
    found = [_decoded(one) if isinstance(one, str) else one for one in decoded]
    if not any(isinstance(one, dict) for one in found):
        return ()
    return tuple(_tool(one, number) for number, one in enumerate(found))


def _decoded(value: object) -> Any:
    """Return JSON text as its value, and an object or a list without the None values that tables add."""
    if not isinstance(value, str):
        return without_nulls(value)
    try:
        return plain(read_json(value))
    except NotPlainError as error:
        raise RowError(f"{COLUMN!r} {error}") from error
    except (ValueError, RecursionError) as error:
        if value.lstrip().startswith(("{", "[{")):
            raise RowError(f"{COLUMN!r} is not JSON ({error}); write function schemas as JSON, or rename it") from error
        return None


def _tool(value: object, number: int) -> RowTool:
    if not isinstance(value, dict):
        raise RowError(f"{COLUMN}[{number}] is not an object")
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(f"{COLUMN}[{number}] has no name")
    if function is value:
        function = {key: one for key, one in value.items() if key != "type"}
        value = {"type": value.get("type", "function"), "function": function}
    return RowTool(function["name"], schema=value)
