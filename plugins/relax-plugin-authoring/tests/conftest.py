# SPDX-License-Identifier: Apache-2.0
"""The fake distributions that the tests of the registry use, too."""

from tests.unit.registry.conftest import half, site

__all__ = ["half", "site"]
