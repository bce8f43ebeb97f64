# SPDX-License-Identifier: Apache-2.0
"""What is refused before SGLang is asked: an interpreter without it, stand-ins beside a GPU, an engine that was not started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from relax_plugin_sglang.cpu_stand_ins import install
from relax_plugin_sglang.engine import SglangEngine
from relax_plugin_sglang.options import SglangOptions

from relax_core.api import ConfigError, EngineSpec, GenerateRequest, InfrastructureError


def test_an_interpreter_without_sglang_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_plugin_sglang.environment_variables.find_spec", lambda name: None)

    async def start() -> None:
        await SglangEngine(SglangOptions()).start(EngineSpec({"path": str(tmp_path)}, 64))

    with pytest.raises(ConfigError, match=r"engine.python .*pip install 'relax-plugin-sglang\[sglang\]'"):
        asyncio.run(start())


def test_an_engine_that_was_not_started_says_so() -> None:
    engine = SglangEngine()
    with pytest.raises(InfrastructureError, match="call start first"):
        engine.generate([GenerateRequest("r", (1,), 1)])
    assert not asyncio.run(engine.health()).ok


def test_stand_ins_are_refused_on_a_machine_with_a_gpu() -> None:
    with pytest.raises(InfrastructureError, match="on a machine with a GPU"):
        install(gpu=True)
