# SPDX-License-Identifier: Apache-2.0
"""Checks of answers before a set's rule scores them, for rules that evaluate Python or accept wrong answers.

An answer that fails the check scores 0, and the set's rule never reads it. The rules of all sets without a check here
treat answers only as text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

_SUM = re.compile(r"(?:[\d\s+\-/().]|\*(?!\s*\*))*")
"""Integers and the four basic operations; no powers, because an answer could write arbitrarily large powers."""
_POLYNOMIAL = re.compile(
    r"""(?: [\d\s+\-/()] | \.(?=\d) | (?<=\d)\.(?!\s*[A-Za-z_])  # numbers
          | [A-Za-z](?![A-Za-z_\d])                              # variables
          | \*(?!\*) | \*\*\s*\d{1,2}(?![\d.]|\s*\*\*)           # products and powers
        )*""",
    re.VERBOSE,
)
"""Numbers, variables of one letter, and powers with an exponent of at most two digits; powers of powers are
excluded."""
_COMPLEX = re.compile(r"[-+\d.eEiIjJ()\s]*")


def is_inert(text: str) -> bool:
    """Return True if evaluating a text as Python runs no code: a literal, a single name, or a syntax error."""
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
    "complex_arithmetic": _only(_COMPLEX),  # excludes nan, which the rule would accept for every number
}
"""Check of answers by set name. An answer must pass the check before the set's rule scores the answer."""
