# SPDX-License-Identifier: Apache-2.0
"""The public API: the contracts between the core and plugins.

docs/plugins.md lists all packages of the core that a plugin may import. Names load on first use. No module here imports
ray or torch, and only `options` imports pydantic.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
