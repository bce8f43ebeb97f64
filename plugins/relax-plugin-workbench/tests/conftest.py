# SPDX-License-Identifier: Apache-2.0
"""The run that the tests of views read, too."""

from tests.unit.views.conftest import clock, write_run

__all__ = ["clock", "write_run"]
