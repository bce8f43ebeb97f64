# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM that a configuration may not give: the engine sets them, or does not use them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from relax_plugin_vllm.model import arguments_of
from relax_plugin_vllm.options import OWN, VllmOptions

from relax_core.api import EngineSpec
from relax_core.testing.engine_fixture import tiny_qwen3


def test_each_argument_that_the_engine_sets_is_in_the_list(tmp_path: Path) -> None:
    spec = EngineSpec({"path": tiny_qwen3(str(tmp_path), 0)}, 64)
    assert arguments_of(spec, VllmOptions()).keys() - {"block_size"} <= OWN.keys()


def test_an_argument_of_the_engine_itself_is_refused_with_its_field() -> None:
    with pytest.raises(
        ValidationError, match=r"engine_args: got max_num_seqs \(set engine.max_batch_rows\), which this engine"
    ):
        VllmOptions(engine_args={"max_num_seqs": 4})


@pytest.mark.parametrize("name", ["logits_processors"])
def test_an_argument_of_the_replaced_sampler_is_refused(name: str) -> None:
    with pytest.raises(
        ValidationError, match=f"engine_args: got {name}; this engine samples without vLLM's sampler, so remove it"
    ):
        VllmOptions(engine_args={name: {}})
