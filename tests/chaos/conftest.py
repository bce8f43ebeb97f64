# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the whole runs among these tests."""

from __future__ import annotations

from tests.graph.conftest import tiny

__all__ = ["tiny"]
