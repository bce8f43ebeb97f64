# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a run on Ray: one placement group with a bundle for each place that the plan names.

Processes that the plan puts on one GPU are put into its bundle, each with its part of it, so that they share that one
and no other. It belongs to the hub, and ends with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup, placement_group

from relax_core.api.errors import ConfigError
from relax_core.roles.plan import Plan

BUNDLE_CPUS = 0.001
"""Ray wants a bundle to hold something; cores are shared by the operating system."""
PARTS = 10_000
"""Of a resource: Ray counts no finer."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bundles by the devices that they stand for."""

    group: PlacementGroup
    seats: tuple[tuple[str, ...], ...]

    def bundle(self, seat: tuple[str, ...]) -> int:
        return self.seats.index(seat)


def open_room(plan: Plan) -> Room | None:
    """Ask for all GPUs of the run at once; None where the plan names none."""
    seats = gpu_seats(plan)
    if not seats:
        return None
    bundles = [{"GPU": float(len(seat)), "CPU": BUNDLE_CPUS * plan.seats[seat]} for seat in seats]
    return Room(placement_group(bundles, strategy="PACK"), seats)


def gpu_seats(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Places with GPUs, in order. Raises ConfigError where processes would share only some of their GPUs, or several."""
    found = sorted((seat for seat in plan.seats if any(name.startswith("gpu:") for name in seat)), key=_order)
    for seat in found:
        if len(seat) > 1 and plan.num_gpus(seat) < len(seat):
            fix = "Ray can share a GPU only among processes that have no other: give them devices of their own, or one each"
            raise ConfigError("placement", f"{', '.join(seat)} of one process, shared with others", fix)
    return tuple(found)


def part(num_gpus: float) -> float:
    """As Ray counts: parts of one GPU never add up to more than it."""
    return math.floor(num_gpus * PARTS) / PARTS


def _order(seat: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(int(name.removeprefix("gpu:")) for name in seat)
