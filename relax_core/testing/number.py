# SPDX-License-Identifier: Apache-2.0
"""A check for finite numbers."""

from __future__ import annotations

import math
from numbers import Real


def is_finite(value: object) -> bool:
    """Return True for a real number of Python or numpy that is neither NaN nor infinite."""
    return isinstance(value, Real) and math.isfinite(value)
