# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-VL sees in vLLM what a plain forward of it sees; a model without vision is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from relax_plugin_vllm.engine import VllmEngine
from relax_plugin_vllm.options import VllmOptions

from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import EngineFixture, tiny_qwen3
from tests.engines.seeing import SeeingSuite


class TestVllmSees(SeeingSuite):
    @classmethod
    def make_engine(cls) -> Engine:
        engine = VllmEngine(VllmOptions())
        engine.build = lambda chosen: Disk()
        return engine


def test_a_model_that_does_not_see_is_refused_where_the_run_has_media(tmp_path: Path) -> None:
    lab = EngineFixture(VllmEngine(VllmOptions()), tiny_qwen3(str(tmp_path / "blind"), 1), "")
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM"):
        lab.start(media=str(tmp_path))
