# SPDX-License-Identifier: Apache-2.0
"""Plugins, found by package metadata, loaded one at a time, and looked up by kind and name; start at `catalogue.py`.

Names load on first use, so that `relax --help` reads metadata without the loader of plugins.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
