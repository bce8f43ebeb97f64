# SPDX-License-Identifier: Apache-2.0
"""The calculator: an MCP server on standard input and output, with one tool.

`python -m relax_contrib.recipes.calculator.server`; the recipe's environment starts it.
"""

from __future__ import annotations

import operator
import re

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"(\d{1,9})([-+*])(\d{1,9})", re.ASCII)


def calculate(expression: str) -> str:
    """Calculate one sum, difference or product of two whole numbers, such as 12*7."""
    read = EXPRESSION.fullmatch(expression)
    return "?" if read is None else str(OPERATORS[read[2]](int(read[1]), int(read[3])))


def main() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("calculator", log_level="WARNING")
    server.tool(structured_output=False)(calculate)
    server.run("stdio")


if __name__ == "__main__":
    main()
