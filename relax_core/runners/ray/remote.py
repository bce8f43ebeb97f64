# SPDX-License-Identifier: Apache-2.0
"""One service of the hub, called by method name; and the two services that need nothing but that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from relax_core.api.events import Event
from relax_core.api.status import Beat, Command, CommandName
from relax_core.api.trainer import Chosen
from relax_core.api.version import Version
from relax_core.api.weights import Manifest, Receipt
from relax_core.runners.ray.answer import asked

CALL_S = 120.0
"""Beyond any `wait_s` that a call carries: then the hub itself is in trouble."""


class Remote:
    """Calls one service."""

    def __init__(self, hub: Any, service: str) -> None:
        self._hub, self._service = hub, service

    async def call(self, method: str, *args: Any) -> Any:
        return await asked(
            self._hub.call.remote(self._service, method, args), "hub", f"{self._service}.{method}", CALL_S
        )


class BoardClient:
    """`api.status.Board`."""

    def __init__(self, hub: Remote) -> None:
        self._hub = hub

    async def beat(self, beat: Beat) -> None:
        await self._hub.call("beat", beat)

    async def beats(self) -> tuple[Beat, ...]:
        return cast(tuple[Beat, ...], await self._hub.call("beats"))

    async def emit(self, event: Event) -> None:
        await self._hub.call("emit", event)

    async def events(self, after: int, wait_s: float) -> tuple[tuple[int, Event], ...]:
        return cast(tuple[tuple[int, Event], ...], await self._hub.call("events", after, wait_s))

    async def command(self, role: str, name: CommandName, argument: str = "") -> None:
        await self._hub.call("command", role, name, argument)

    async def commands(self, role: str, after: int, wait_s: float) -> tuple[Command, ...]:
        return cast(tuple[Command, ...], await self._hub.call("commands", role, after, wait_s))


class WeightClient:
    """`api.role.WeightService`."""

    def __init__(self, hub: Remote) -> None:
        self._hub = hub

    async def announce(self, manifest: Manifest, transport: Chosen) -> None:
        await self._hub.call("announce", manifest, transport)

    async def newest(self, model: str, after: Version | None, wait_s: float) -> tuple[Manifest, Chosen] | None:
        return cast(tuple[Manifest, Chosen] | None, await self._hub.call("newest", model, after, wait_s))

    async def receipt(self, receipt: Receipt) -> None:
        await self._hub.call("receipt", receipt)

    async def receivers(self, model: str) -> Mapping[str, Version]:
        return cast(Mapping[str, Version], await self._hub.call("receivers", model))
