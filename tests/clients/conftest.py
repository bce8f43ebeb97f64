# SPDX-License-Identifier: Apache-2.0
"""Agents written with real client libraries, `renderers`, and environments of verifiers, in interpreters of their own.

`scripts/clients` makes these, and `.ci/clients` names them to the tests. Elsewhere they are not collected.
"""

from __future__ import annotations

import os

from tests.graph.conftest import relax

__all__ = ["relax"]

PYTHON = os.environ.get("RELAX_CLIENTS", "")
VERIFIERS = os.environ.get("RELAX_VERIFIERS", "")
collect_ignore = [
    *([] if PYTHON else ["test_clients.py", "test_renderers.py"]),
    *([] if VERIFIERS else ["test_verifiers.py"]),
]
