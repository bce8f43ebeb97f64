# SPDX-License-Identifier: Apache-2.0
"""Roles of a run, and the parts that a plugin's role is made of: `ForwardLoop`, `StepTrainer`, `RankGroup`.

Names load on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
