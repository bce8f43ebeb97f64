# SPDX-License-Identifier: Apache-2.0
"""The test of whether a value is a number that can be learnt from."""

from __future__ import annotations

import math
from numbers import Real


def is_finite(value: object) -> bool:
    """Any real number of Python or numpy that is neither NaN nor infinite."""
    return isinstance(value, Real) and math.isfinite(value)
