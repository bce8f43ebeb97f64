# SPDX-License-Identifier: Apache-2.0
"""A host and the component that it calls."""

from __future__ import annotations

from typing import Any

from relax_core.api import Options
from relax_core.api.component import Configurable
from relax_core.rpc.host import Host


class Heavy(Configurable[Options]):
    def start(self, spec: int) -> dict[str, int]:
        return {"spec": spec}

    def name(self) -> str:
        return "heavy"


class Light(Configurable[Options]):
    def start(self, spec: int) -> Heavy:
        return Heavy()


async def test_a_component_that_a_method_returns_gets_that_call_and_all_later_ones() -> None:
    host = Host(Light(), Any)
    assert await host.call("start", (3,)) == {"spec": 3}
    assert await host.call("name", ()) == "heavy"
