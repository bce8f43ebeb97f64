# SPDX-License-Identifier: Apache-2.0
"""The torch trainer, which also tells how many bytes of tensors an update held at its peak, by torch's own allocator.

The allocator's account is not that of the estimate: it has what kernels allocate for themselves, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from relax_plugin_torch.rank import Rank
from relax_plugin_torch.sharding import local

from relax_core.api import UpdateResult

MEMORY = "[memory]"


class Watched(Rank):
    """Ask for `peak_bytes` once an update is finished."""

    _peak = 0
    watches = True
    """Watching takes time."""

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        if self.watches:
            self._held = held(self)
            self._timeline = memory_profile()
            self._timeline.__enter__()
        super().begin_update(denominators)

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        done = super().finish_update(denominators)
        if self.watches:
            self._timeline.__exit__(None, None, None)
            self._peak = self._held + most_held(self._timeline)
        return done

    def peak_bytes(self) -> int:
        """Of the last update, with what it began with."""
        return self._peak


def held(rank: Rank) -> int:
    """Weights and optimizer state, this rank's."""
    state = [value for values in rank._optimizer.state.values() for value in values.values()]
    tensors = [*rank._model.parameters(), *rank._model.buffers(), *state]
    storages = [local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def memory_profile() -> torch.profiler.profile:
    """Enter and leave it on the thread that is watched."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=False)


def most_held(profile: torch.profiler.profile) -> int:
    """The most bytes that were allocated since it began and not yet freed."""
    told = profile.profiler
    if told is None or told.kineto_results is None:
        raise RuntimeError("the profiler has recorded nothing")
    found = [event for event in told.kineto_results.events() if event.name() == MEMORY]
    now = most = 0
    for event in sorted(found, key=lambda event: int(event.start_ns())):
        now += event.nbytes()
        most = max(most, now)
    return most
