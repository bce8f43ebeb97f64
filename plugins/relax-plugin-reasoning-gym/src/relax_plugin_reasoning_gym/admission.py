# SPDX-License-Identifier: Apache-2.0
"""The texts that a set's rule may be given: those of some sets evaluate an answer as Python, or accept what is no answer.

An answer that is not admitted is wrong and the rule never sees it. A set that is not named here reads text as text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

_SUM = re.compile(r"(?:[\d\s+\-/().]|\*(?!\s*\*))*")
"""Integers and the four operations; no powers, which could be as large as an answer likes."""
_POLYNOMIAL = re.compile(
    r"""(?: [\d\s+\-/()] | \.(?=\d) | (?<=\d)\.(?!\s*[A-Za-z_])  # numbers
          | [A-Za-z](?![A-Za-z_\d])                              # variables
          | \*(?!\*) | \*\*\s*\d{1,2}(?![\d.]|\s*\*\*)           # products and powers
        )*""",
    re.VERBOSE,
)
"""Numbers, variables of one letter, and powers with an exponent of at most two digits, none of which is a power itself."""
_COMPLEX = re.compile(r"[-+\d.eEiIjJ()\s]*")


def is_inert(text: str) -> bool:
    """Tell whether evaluating a text as Python does nothing: it is a literal, one name, or no expression at all."""
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
        if isinstance(tree.body, ast.Name):
            return True
        ast.literal_eval(tree)
    except SyntaxError:
        return True
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _only(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda text: pattern.fullmatch(text) is not None


ADMITTED: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": is_inert,
    "n_queens": is_inert,
    "spiral_matrix": is_inert,
    "string_insertion": is_inert,
    "countdown": _only(_SUM),
    "simple_integration": _only(_POLYNOMIAL),
    "complex_arithmetic": _only(_COMPLEX),  # nan would be as near as can be to every number
}
"""By set, the test that an answer must pass before its rule reads it."""
