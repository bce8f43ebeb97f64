"""The role `{{ cookiecutter.name }}`: fills a column with the number of trained tokens of each row.

A role uses only its `Context`, so the same code runs in one process, on Ray, and under a virtual clock in tests.
"""

from typing import Any

import numpy as np

from relax_core.api import ClaimRequest, Context, Operation, Options, Ragged, Role, StaleFence

POLL_S = 1.0
"""Seconds that one call waits for rows, before the role looks whether the run stops."""
COLUMN = "{{ cookiecutter.name.replace('-', '_') }}_lengths"


class {{ cookiecutter.class_name }}(Role[Options]):
    """A role that joins a run whose algorithm lists the column in `columns()`. It has no state, so a restart loses nothing."""

    name = "{{ cookiecutter.name }}"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        """Declare the columns that the role reads and fills; the planner places the role in the graph."""
        name = cls.name.replace("-", "_")
        return (Operation(f"{name}.count", cls.name, frozenset({"loss_mask"}), frozenset({COLUMN})),)

    async def run(self, context: Context[Any]) -> None:
        """Claim rows, fill the column and acknowledge, until the last step of the run is committed."""
        request = ClaimRequest(self.name, ("loss_mask",), context.config.rollout.groups_per_step)
        while not context.stopping:
            await context.pause_point()
            with context.waiting("finished groups", "rollout", POLL_S):
                claim = await context.bus.claim(request, POLL_S)
            if claim is None:
                if (await context.bus.version()).step >= context.config.steps:
                    return
                continue
            try:
                masks = (await context.bus.read(claim, ("loss_mask",))).columns["loss_mask"]
                counts = np.array([mask.sum() for mask in masks.rows()], np.float32)
                await context.bus.write(claim, {COLUMN: Ragged(counts, np.ones(len(counts), np.int64))})
                await context.bus.acknowledge(claim)
            except StaleFence:
                pass  # the row lease is over: the rows go to the next claim
