# SPDX-License-Identifier: Apache-2.0
"""The grid of a trainer's ranks: tensor, context, data and pipeline parallel, in Megatron's order. Needs no torch.

Rank = tensor + T * (context + C * (data + D * pipeline)). Ranks that differ only in `tensor`, `context` or `pipeline`
compute the same rows together. Experts are spread over the ranks of one pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.api import ConfigError

PREFIX = "trainer."


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of the parallel groups of `world` ranks."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1
    """Chunks of consecutive layers on each pipeline stage."""

    @property
    def fits(self) -> bool:
        """True if the ranks that compute the same rows divide the number of ranks."""
        return self.world % (self.tensor * self.pipeline * self.context) == 0

    def check(self) -> None:
        """Raise ConfigError for sizes that do not divide the number of ranks."""
        if not self.fits:
            sizes = f"tensor_parallel {self.tensor} x pipeline_parallel {self.pipeline}"
            sizes += f" x context_parallel {self.context}" if self.context > 1 else ""
            raise ConfigError(
                f"{PREFIX}tensor_parallel", f"{sizes} on {self.world} ranks",
                "the product must divide placement.actor.ranks; set as many ranks, or a multiple",
            )  # fmt: skip
        if self.virtual > 1 and self.pipeline == 1:
            fix = "it divides the layers of each pipeline stage; set trainer.pipeline_parallel to 2 or more"
            raise ConfigError(f"{PREFIX}virtual_pipeline", self.virtual, fix)
        stage = self.world // self.pipeline
        if stage % (self.expert * self.expert_tensor):
            raise ConfigError(
                f"{PREFIX}expert_parallel", f"{self.expert} x expert_tensor_parallel {self.expert_tensor}",
                f"the product must divide the {stage} ranks of a pipeline stage; set a divisor of {stage}",
            )  # fmt: skip

    @property
    def data(self) -> int:
        """Number of groups of ranks with different rows."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Number of ranks of a pipeline stage that hold the same part of the same experts."""
        return self.world // (self.pipeline * self.expert * self.expert_tensor)

    def data_index(self, rank: int) -> int:
        """Return the index of the rows that this rank computes, below `data`."""
        return rank // (self.tensor * self.context) % self.data

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank; the last stage computes log-probs."""
        return rank // (self.tensor * self.context * self.data)

    def layers(self, rank: int, count: int) -> list[int]:
        """Return the layers that a rank holds of `count`, in order; with chunks, each stage has a part of every round."""
        each = count // (self.pipeline * self.virtual)
        firsts = (each * (chunk * self.pipeline + self.stage(rank)) for chunk in range(self.virtual))
        return [first + layer for first in firsts for layer in range(each)]

    def reports(self, rank: int) -> bool:
        """Return True on the one rank of each data-parallel group that reports loss terms and scored rows."""
        return self.stage(rank) == self.pipeline - 1 and rank % (self.tensor * self.context) == 0
