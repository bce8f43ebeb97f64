# SPDX-License-Identifier: Apache-2.0
"""The `shuffle` sampler: every task once an epoch, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import random
from array import array
from functools import lru_cache

from relax_core.api.options import Options
from relax_core.api.source import Sampler


class ShuffleOptions(Options):
    shuffle: bool = True
    """False: the order of the file, every epoch."""


class Shuffle(Sampler[ShuffleOptions]):
    """A pure function of the group's issue number; it keeps no state, so a resumed run continues by number."""

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        epoch, place = divmod(group, num_tasks)
        return _order(seed, epoch, num_tasks)[place] if self.options.shuffle else place


@lru_cache(maxsize=4)  # groups of two epochs are in flight at their border, for training and for a second task set
def _order(seed: int, epoch: int, num_tasks: int) -> array[int]:
    order = array("q", range(num_tasks))
    random.Random(f"shuffle {seed} {epoch}").shuffle(order)
    return order
