# SPDX-License-Identifier: Apache-2.0
"""The tools that a row of a task file describes in its column `tools`, for the chat template to show.

Only the prompt shows these tools. Calls of such tools stay in the policy's text, because no environment answers them.
"""

from __future__ import annotations

from relax_core.api.environment import RowTool
from relax_core.data.plain_data import NotPlainError, plain, read_json
from relax_core.data.task_row import RowError, without_nulls

COLUMN = "tools"


def row_tools(value: object) -> tuple[RowTool, ...]:
    """Return the tools in a value of the column `tools`. Raises RowError for a description without a name.

    The value is a list of objects, or such a list as JSON text. Text that begins like JSON and is not JSON is refused.
    Any other value is data for rewards, and describes no tools.
    """
    decoded = _decoded(value)
    if not isinstance(decoded, list):
        return ()
    tools = [_decoded(tool) if isinstance(tool, str) else tool for tool in decoded]
    if not any(isinstance(tool, dict) for tool in tools):
        return ()
    described = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RowError(f"{COLUMN}[{number}] is not an object")
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError(f"{COLUMN}[{number}] has no name")
        schema = tool
        if function is tool:
            fields = {key: value for key, value in tool.items() if key != "type"}
            schema = {"type": tool.get("type", "function"), "function": fields}
        described.append(RowTool(function["name"], schema=schema))
    return tuple(described)


def _decoded(value: object) -> object:
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
