# SPDX-License-Identifier: Apache-2.0
"""The fake distributions of the registry's tests, and the catalogue and the folder of the configuration's tests."""

from tests.unit.config.conftest import catalogue, folder
from tests.unit.registry.conftest import half, site

__all__ = ["catalogue", "folder", "half", "site"]
