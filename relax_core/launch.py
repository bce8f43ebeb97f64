# SPDX-License-Identifier: Apache-2.0
"""The public room for work before a run: compose and check its configuration, plan it, prepare it, find its components.

`launch.pyi` lists the names and their modules, which load on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("relax_core", __file__)
