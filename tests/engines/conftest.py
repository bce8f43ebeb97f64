# SPDX-License-Identifier: Apache-2.0
"""Runs with engines in interpreters of their own, which `scripts/engine` makes and `tox -e engines` names.

Elsewhere they are not collected at all; that environment fails where one is missing.
"""

from __future__ import annotations

import os

from tests.graph.conftest import relax, start, tiny

__all__ = ["relax", "start", "tiny"]

MEGATRON = os.environ.get("RELAX_ENGINE_MEGATRON", "")
INTERPRETERS = {name: os.environ.get(f"RELAX_ENGINE_{name.upper()}", "") for name in ("vllm", "sglang")}
collect_ignore = [] if any(INTERPRETERS.values()) else ["test_engine_runs.py", "test_megatron_runs.py"]
