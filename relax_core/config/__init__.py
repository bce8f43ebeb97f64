# SPDX-License-Identifier: Apache-2.0
"""Typed configuration and its layers: from TOML files and overrides to one checked `RunConfig`. Import-light and lazy.

A new core key is a field of a table in `tables.py`; schema, hints and reference follow from it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
