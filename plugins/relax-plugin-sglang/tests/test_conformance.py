# SPDX-License-Identifier: Apache-2.0
"""The engine contract, held against a tiny Qwen3 in the real SGLang, each engine in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import psutil
from relax_plugin_sglang.engine import SglangEngine

from relax_core.api.engine import Engine
from relax_core.testing.engine import EngineSuite, PrefixChecks
from relax_core.testing.engine_fixture import EngineFixture
from relax_core.testing.engine_hosted import HostedEngine


class TestSglang(PrefixChecks, EngineSuite):
    component = "sglang"
    operation = "aten::"
    options: ClassVar[Mapping[str, Any]] = {"keep_weights": True}
    # It does not claim sleep, and CPUs have none.
    test_sleep_frees_and_wake_restores = None
    test_an_unknown_part_cannot_be_offloaded = None

    @classmethod
    def make_engine(cls) -> Engine:
        return HostedEngine("sglang", SglangEngine.capabilities, cls.options)

    def test_the_engine_process_listens_only_on_loopback(self, lab: EngineFixture) -> None:
        """torch's store and gloo ask nobody for a password."""
        worker: Any = lab.engine
        sockets = psutil.Process(worker._there().pid).net_connections()
        assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"}
