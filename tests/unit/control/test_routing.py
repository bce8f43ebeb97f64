# SPDX-License-Identifier: Apache-2.0
"""The requirements of routing replay, and the columns that the plan then reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.api.family import ROUTED_COLUMNS, Routing
from relax_core.api.plan import Plan
from relax_core.registry.catalogue import Catalogue
from tests.unit.control import conftest

ABLE = """
from typing import ClassVar
from relax_core.api import Capabilities
from relax_plugin_torch.trainer import TorchTrainer
from relax_plugin_transformers.engine import TransformersEngine

class Deaf(TransformersEngine):
    capabilities: ClassVar[Capabilities] = Capabilities()

class Plain(TorchTrainer):
    replays_routing: ClassVar[bool] = False
"""
MOE = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]}


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    file = tmp_path_factory.mktemp("plugin") / "parts.py"
    file.write_text(ABLE)
    return Catalogue.load([str(file)])


def planned(catalogue: Catalogue, folder: Path, *overrides: str, config: dict[str, object] = MOE, **layer: Any) -> Plan:
    (folder / "config.json").write_text(json.dumps(config))
    return conftest.planned(catalogue, *overrides, model={"path": str(folder)}, placement="hybrid", **layer)


ROLLOUT, RECOMPUTE = "model.routing_replay=rollout", "model.routing_replay=recompute"


def test_routed_experts_of_the_rollout_are_columns_that_only_the_actor_reads(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    made = planned(catalogue, tmp_path, ROLLOUT)
    assert set(ROUTED_COLUMNS) <= set(made.trained_columns) and set(ROUTED_COLUMNS) <= made.consumed
    assert set(ROUTED_COLUMNS).isdisjoint(made.advantage_columns)
    assert set(ROUTED_COLUMNS).isdisjoint(planned(catalogue, tmp_path).consumed)


def test_recomputed_routing_needs_a_pass_of_the_actor_and_no_column(catalogue: Catalogue, tmp_path: Path) -> None:
    made = planned(catalogue, tmp_path, RECOMPUTE, "batch.updates_per_step=2", "placement.mode=async")
    assert made.needs_old_log_probs and "old_log_probs" not in made.trained_columns
    assert set(ROUTED_COLUMNS).isdisjoint(made.trained_columns)


@pytest.mark.parametrize(
    ("replay", "change", "message"),
    [
        (ROLLOUT, {"engine": "deaf"}, "engine deaf does not report .* use .*transformers"),
        (ROLLOUT, {"engine": "vllm"}, "engine vllm does not report the experts .* use .*sglang"),
        (ROLLOUT, {"trainer": "plain"}, "trainer plain can't replay routing: use torch"),
        (ROLLOUT, {"config": {"num_hidden_layers": 2}}, "has no experts to route to"),
        (ROLLOUT, {"algorithm": "dpo"}, "rows of a dataset were not sampled here"),
        (RECOMPUTE, {}, "with one update per step this changes nothing"),
    ],
)
def test_impossible_routing_replay_is_refused_with_the_fix(
    catalogue: Catalogue, tmp_path: Path, replay: str, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        planned(catalogue, tmp_path, replay, **change)  # type: ignore[arg-type]
    assert refused.value.field == "model.routing_replay"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (MOE, Routing(2, 2, 8)),
        ({"text_config": {**MOE, "decoder_sparse_step": 3}}, Routing(1, 2, 8)),
        ({"thinker_config": {"text_config": {**MOE, "mlp_only_layers": []}}}, Routing(3, 2, 8)),
        ({"num_hidden_layers": 2, "num_local_experts": 512, "num_experts_per_tok": 4}, Routing(2, 4, 512)),
        ({"num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 1, "first_k_dense_replace": 3},
         Routing(1, 1, 8)),
        ({"num_hidden_layers": 4}, None),
        ({**MOE, "mlp_only_layers": [0, 1, 2]}, None),
    ],
)  # fmt: skip
def test_routing_is_read_from_the_models_configuration(config: dict[str, object], wanted: Routing | None) -> None:
    assert Routing.of(config) == wanted


def test_many_experts_take_two_bytes_a_choice() -> None:
    assert (Routing(3, 2, 256).width, Routing(3, 2, 257).width) == (6, 12)
    assert (Routing(3, 2, 256).dtype, Routing(3, 2, 257).dtype) == ("uint8", "uint16")
