# SPDX-License-Identifier: Apache-2.0
"""Whether a plan fits: what its processes need together, on the host and on each device, beside what is there.

Groups that take turns on devices are counted one awake at a time, beside what the others keep in memory meanwhile.
Bytes are those of tensors and of a process's libraries; what an allocator holds in reserve comes on top, so only what
surely can't fit is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from relax_core.api.errors import ConfigError
from relax_core.api.estimate import RESERVED, Estimate
from relax_core.control.needs import Need
from relax_core.roles.plan import WorkerGroup

LIBRARIES = 1 << 29
"""Taken for a process with torch and transformers; a rank that has trained a tiny model holds 0.35 GiB on a CPU."""
KEPT = {"weights": "parameters", "optimizer": "optimizer", "kv": "kv cache"}
"""Parts that stay between turns unless they sleep, as estimates name them."""
IN_SHARED_MEMORY = "published"
"""A part that lies in the host's memory, whatever device the process uses."""
FIXES = {
    "activations": ("batch.tokens_per_micro_batch", "set fewer, or shorten rows with rollout.max_new_tokens"),
    "logits": ("trainer.logits_mb", "set less: logits are computed in more slices"),
    "kv cache": (
        "rollout.prompts_per_step",
        "set fewer, shorten rows with rollout.max_new_tokens, or use more engines",
    ),
    "optimizer": (
        "model.path",
        "share the state over more ranks (trainer.sharding), train adapters, or use a smaller model",
    ),
}


@dataclass(frozen=True, slots=True)
class Room:
    """A memory and what is to lie in it."""

    name: str
    needed: int
    available: int
    """0: unknown."""
    largest: str = ""
    """The part that needs most of it."""

    @property
    def fits(self) -> bool:
        return not self.available or self.needed <= self.available

    def check(self) -> None:
        """Raise ConfigError where it can't fit."""
        if self.fits:
            return
        field, fix = FIXES.get(self.largest, FIXES["optimizer"])
        got = f"a plan that needs {gib(self.needed)} of {self.name}, which has {gib(self.available)} to give"
        go_on = "with --anyway (placement.check_memory=false) this is no error"
        raise ConfigError(field, got, f"most of it is {self.largest}: {fix}; {go_on}")


def rooms(needs: Iterable[Need], host_bytes: int, device_bytes: Mapping[str, int]) -> tuple[Room, ...]:
    """The host's memory, then each device's that is known."""
    known = [need for need in needs if need.processes]
    on_host = [need for need in known if not _on_gpu(need.group)]
    shared = sum(parts.get(IN_SHARED_MEMORY, 0) for need in known for parts in _phases(need.processes[0]))
    libraries = LIBRARIES * sum(need.group.size for need in known)
    needed = shared + libraries + sum(_together(cluster, True) for cluster in _clusters(on_host))
    found = [Room("host memory", needed, host_bytes, _largest(on_host))]
    for device in sorted({name for need in known if _on_gpu(need.group) for name in need.group.devices}):
        here = [need for need in known if device in need.group.devices]
        found.append(Room(device, _together(here, False), device_bytes.get(device, 0), _largest(here)))
    return tuple(found)


def gib(size: float) -> str:
    """For people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"


def _together(cluster: list[Need], every: bool) -> int:
    """The most that is alive at once of groups that take turns; of each all processes, or one on this device."""
    gather = sum if every else max
    awake = {need.group.name: gather([_peak(one) for one in need.processes]) for need in cluster}
    asleep = {need.group.name: gather([_rest(one, need.group) for one in need.processes]) for need in cluster}
    return max(awake[name] + sum(size for other, size in asleep.items() if other != name) for name in awake)


def _peak(estimate: Estimate) -> int:
    return max((sum(parts.values()) - parts.get(IN_SHARED_MEMORY, 0) for parts in _phases(estimate)), default=0)


def _rest(estimate: Estimate, group: WorkerGroup) -> int:
    """What stays of a process between its turns."""
    kept = [name for part, name in KEPT.items() if part not in group.sleeps]
    return max((sum(parts.get(name, 0) for name in kept) for parts in _phases(estimate)), default=0)


def _clusters(needs: list[Need]) -> Iterator[list[Need]]:
    """Groups by who shares devices with whom."""
    left = list(needs)
    while left:
        cluster, devices = [left.pop(0)], frozenset[str]()
        while True:
            devices = frozenset[str]().union(*(need.group.devices for need in cluster))
            more = [need for need in left if need.group.devices & devices]
            if not more:
                break
            cluster += more
            left = [need for need in left if need not in more]
        yield cluster


def _largest(needs: list[Need]) -> str:
    """The part with the most bytes in anybody's fullest phase."""
    parts: dict[str, int] = {}
    for need in needs:
        for estimate in need.processes:
            phase, _ = estimate.peak()
            for name, size in estimate.phases.get(phase, {}).items():
                if name == RESERVED:
                    continue  # it follows the others
                parts[name] = parts.get(name, 0) + size
    return max(parts, key=lambda name: parts[name], default="")


def _phases(estimate: Estimate) -> Iterable[Mapping[str, int]]:
    return estimate.phases.values()


def _on_gpu(group: WorkerGroup) -> bool:
    return any(name.startswith("gpu:") for name in group.devices)
