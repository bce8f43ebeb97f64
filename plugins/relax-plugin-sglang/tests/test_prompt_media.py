# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-VL sees in SGLang what a plain forward of it sees; a model without vision is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from relax_plugin_sglang.engine import SglangEngine
from relax_plugin_sglang.prompt_media import PromptMedia

from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.testing.engine_hosted import HostedEngine
from tests.engines.seeing import SeeingSuite


class TestSglangSees(SeeingSuite):
    @classmethod
    def make_engine(cls) -> Engine:
        return HostedEngine("sglang", SglangEngine.capabilities)


def test_a_model_that_does_not_see_is_refused_where_the_run_has_media() -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM"):
        PromptMedia("media", SimpleNamespace(architectures=["Qwen3ForCausalLM"]))
