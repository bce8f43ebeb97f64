# SPDX-License-Identifier: Apache-2.0
"""One service of the hub, called by method name; and the services that need nothing but that."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from relax_core.api.events import Event, StepFinished
from relax_core.api.status import Command, CommandName, Heartbeat
from relax_core.api.trainer import Chosen
from relax_core.api.weights import Manifest, Receipt, Version
from relax_core.devices.scheduler import DeviceCommand, DeviceRequest
from relax_core.runners.ray.connection import RpcClient, asked

CALL_S = 120.0
"""Beyond any `wait_s` that a call carries: then the hub itself is in trouble."""


class RemoteService:
    """Calls one service."""

    def __init__(self, hub: RpcClient, service: str) -> None:
        self._hub, self._service = hub, service

    async def call(self, method: str, *args: Any) -> Any:
        return await asked(self._hub.call(self._service, method, args), "hub", f"{self._service}.{method}", CALL_S)


@dataclass(frozen=True, slots=True)
class OpaqueEvent:
    """An event that the hub passes on unopened: samples are many small things, and only the controller reads them.

    Not of a step's end, on which the board writes its time.
    """

    packed: bytes


class RunStatusClient:
    """`api.status.Board`."""

    def __init__(self, hub: RemoteService) -> None:
        self._hub = hub

    async def beat(self, beat: Heartbeat) -> None:
        await self._hub.call("beat", beat)

    async def beats(self) -> tuple[Heartbeat, ...]:
        return cast(tuple[Heartbeat, ...], await self._hub.call("beats"))

    async def emit(self, event: Event) -> None:
        told = event if isinstance(event, StepFinished) else OpaqueEvent(pickle.dumps(event, pickle.HIGHEST_PROTOCOL))
        await self._hub.call("emit", told)

    async def events(self, after: int, wait_s: float) -> tuple[tuple[int, Event], ...]:
        found = await self._hub.call("events", after, wait_s)
        return tuple((number, pickle.loads(e.packed) if isinstance(e, OpaqueEvent) else e) for number, e in found)

    async def command(self, role: str, name: CommandName, argument: str = "") -> None:
        await self._hub.call("command", role, name, argument)

    async def commands(self, role: str, after: int, wait_s: float) -> tuple[Command, ...]:
        return cast(tuple[Command, ...], await self._hub.call("commands", role, after, wait_s))


class WeightClient:
    """`api.role.WeightService`."""

    def __init__(self, hub: RemoteService) -> None:
        self._hub = hub

    async def announce(self, manifest: Manifest, transport: Chosen) -> None:
        await self._hub.call("announce", manifest, transport)

    async def newest(self, model: str, after: Version | None, wait_s: float) -> tuple[Manifest, Chosen] | None:
        return cast(tuple[Manifest, Chosen] | None, await self._hub.call("newest", model, after, wait_s))

    async def receipt(self, receipt: Receipt) -> None:
        await self._hub.call("receipt", receipt)

    async def route(
        self,
        model: str,
        have: Version | None,
        wait_s: float,
        after: Version | None = None,
        receiver: str = "",
        within_s: float = 300.0,
    ) -> tuple[tuple[Manifest, Chosen], ...]:
        found = await self._hub.call("route", model, have, wait_s, after, receiver, within_s)
        return cast(tuple[tuple[Manifest, Chosen], ...], found)

    async def needed(self, model: str) -> frozenset[Version]:
        return cast(frozenset[Version], await self._hub.call("needed", model))

    async def handed_out(self, version: Version) -> None:
        await self._hub.call("handed_out", version)

    async def want(self, receiver: str, model: str) -> None:
        await self._hub.call("want", receiver, model)

    async def wanted(self, model: str) -> tuple[str, ...]:
        return cast(tuple[str, ...], await self._hub.call("wanted", model))

    async def forget(self, receiver: str, model: str) -> None:
        await self._hub.call("forget", receiver, model)

    async def receivers(self, model: str) -> Mapping[str, Version]:
        return cast(Mapping[str, Version], await self._hub.call("receivers", model))


class DeviceServiceClient:
    """Implements `devices.scheduler.DeviceService` by calls to the hub."""

    def __init__(self, hub: RemoteService) -> None:
        self._hub = hub

    async def enter(self, owner: str) -> None:
        await self._hub.call("enter", owner)

    async def join(self, owner: str, name: str, devices: frozenset[str]) -> None:
        await self._hub.call("join", owner, name, devices)

    async def leave(self, owner: str, name: str) -> None:
        await self._hub.call("leave", owner, name)

    async def acquire(self, request: DeviceRequest) -> str:
        return cast(str, await self._hub.call("acquire", request))

    async def change_phase(self, request: DeviceRequest) -> str:
        return cast(str, await self._hub.call("change_phase", request))

    async def release(self, owner: str, lease_id: str) -> None:
        await self._hub.call("release", owner, lease_id)

    async def done(self, owner: str, number: int, freed_bytes: int) -> None:
        await self._hub.call("done", owner, number, freed_bytes)

    async def poll(self, owner: str, after: int, wait_s: float) -> tuple[DeviceCommand, ...]:
        return cast(tuple[DeviceCommand, ...], await self._hub.call("poll", owner, after, wait_s))
