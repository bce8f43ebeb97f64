# SPDX-License-Identifier: Apache-2.0
"""The Megatron trainer in rank processes on a CPU: each process patches megatron-core before it starts a trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from relax_plugin_megatron.trainer import MegatronTrainer

from relax_core.api import Chosen, Manifest, Trainer, TrainerSpec
from relax_core.tensor_files.transport import Disk
from relax_core.testing.trainer_ranks import RankedTrainer, TrainerRanks

DISK = Chosen("weight-transport", "disk")
"""A transport through files; other names give a transport in memory."""


class MegatronOnCpu(MegatronTrainer):
    """The trainer in a process of its own, which it patches."""

    def start(self, spec: TrainerSpec) -> Mapping[str, Any] | Trainer[Any]:
        import torch

        from tests.megatron_on_cpu import apply

        if not torch.cuda.is_available():
            apply()
        if self.options.offload_optimizer:  # from the CPU's memory to the CPU's memory
            from relax_plugin_megatron import rank

            rank.check_offload = lambda *_: None
        build, disk = self.build, Disk()
        self.build = lambda chosen: disk if chosen == DISK else build(chosen)
        return super().start(spec)


class PatchedRanks(RankedTrainer):
    """Ranks of this trainer, with the facts that each rank told at its start."""

    idle: dict[int, list[TrainerRanks]] = {}
    """Processes of its own: other trainers must not get a patched torch."""

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        self.facts_of_ranks: list[Mapping[str, Any]] = []
        return super().start(spec)

    def _each(self, method: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        answers = super()._each(method, calls)
        if method == "start":
            self.facts_of_ranks = answers
        return answers

    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        self._all("load_published", manifest, transport)

    def threads(self) -> list[int]:
        """Return the number of threads of each rank's process."""
        return [len(os.listdir(f"/proc/{process.pid}/task")) for process in self._ranks.processes]
