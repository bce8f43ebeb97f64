# SPDX-License-Identifier: Apache-2.0
"""What is refused before vLLM is asked: an interpreter without it, an engine that was not started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from relax_plugin_vllm.engine import VllmEngine
from relax_plugin_vllm.options import VllmOptions

from relax_core.api import ConfigError, EngineSpec, GenerateRequest, InfrastructureError


def test_an_interpreter_without_vllm_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_plugin_vllm.environment_variables.find_spec", lambda name: None)

    async def start() -> None:
        await VllmEngine(VllmOptions()).start(EngineSpec({"path": str(tmp_path)}, 64))

    with pytest.raises(ConfigError, match=r"engine.python .*pip install 'relax-plugin-vllm\[vllm\]'"):
        asyncio.run(start())


def test_stages_on_a_cpu_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_plugin_vllm.engine.on_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"engine\.pipeline_parallel: got 2; .*engine\.tensor_parallel"):
        asyncio.run(VllmEngine(VllmOptions(pipeline_parallel=2)).start(EngineSpec({"path": str(tmp_path)}, 64)))


def test_an_iteration_without_room_for_a_token_of_each_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens: got 16, less than max_batch_rows = 256.*; raise it"):
        VllmOptions(max_batch_tokens=16)


def test_an_engine_that_was_not_started_says_so() -> None:
    engine = VllmEngine()
    with pytest.raises(InfrastructureError, match="call start first"):
        engine.generate([GenerateRequest("r", (1,), 1)])
    assert not asyncio.run(engine.health()).ok
