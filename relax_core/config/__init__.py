# SPDX-License-Identifier: Apache-2.0
"""Typed configuration: TOML files and overrides become one checked `RunConfig`. Modules load on first use.

To add a core key, add a field to a table in `tables.py`; schema, hints and reference are generated from it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
