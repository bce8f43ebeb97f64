# SPDX-License-Identifier: Apache-2.0
"""The list of refused arguments names each argument that the engine sets."""

from __future__ import annotations

from pathlib import Path

from relax_plugin_vllm.model import arguments_of
from relax_plugin_vllm.options import OWN, VllmOptions

from relax_core.api import EngineSpec
from relax_core.testing.engine_fixture import tiny_qwen3


def test_each_argument_that_the_engine_sets_is_in_the_list(tmp_path: Path) -> None:
    spec = EngineSpec({"path": tiny_qwen3(str(tmp_path), 0)}, 64)
    assert arguments_of(spec, VllmOptions()).keys() - {"block_size"} <= OWN.keys()
