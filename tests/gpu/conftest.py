# SPDX-License-Identifier: Apache-2.0
"""Fixtures of whole runs on a GPU."""

from tests.graph.conftest import start, tiny

__all__ = ["start", "tiny"]
