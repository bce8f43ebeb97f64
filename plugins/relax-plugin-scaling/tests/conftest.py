# SPDX-License-Identifier: Apache-2.0
"""The gate of scripted engines, which the tests of pools have, too."""

from tests.unit.engines.conftest import gate, gate_path

__all__ = ["gate", "gate_path"]
