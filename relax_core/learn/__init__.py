# SPDX-License-Identifier: Apache-2.0
"""Building blocks of algorithms and trainers: batches, chunk plans, and the parts of a loss. Imports only `api`.

Names load on first use. Counting, planning and lag need numpy alone, so a shell that plans chunks never loads torch.
Write `from relax_core import learn` and `learn.clipped_surrogate(...)` to keep the import of an algorithm light, too.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
