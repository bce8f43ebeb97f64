# SPDX-License-Identifier: Apache-2.0
"""The core's roles, and the building blocks for roles of plugins: `ForwardLoop`, `StepTrainer`, `RankGroup`.

Each name's module is imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
