# SPDX-License-Identifier: Apache-2.0
"""Heavy packages are extras of their plugins: which one brings a module that is not installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

from relax_core.plugins.handshake import canonical


def extra_for(distribution: str, error: BaseException) -> str:
    """`distribution[extra]` to install where the error is a module missing that one of its extras names; else empty."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    from packaging.requirements import Requirement

    wanted = canonical(error.name.partition(".")[0])
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        return ""  # a single file, or a class passed from Python: they have no extras
    for requirement in (Requirement(line) for line in lines):
        extra = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
        if extra and canonical(requirement.name) == wanted:
            return f"{distribution}[{extra[1]}]"
    return ""
