# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts that see or hear: what the engine's tokens visited, pictures' too, is what the trainer replays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_core.api import Ragged
from relax_core.api.family import Routing
from relax_core.api.model_folder import routing
from relax_core.testing.moe import routed
from tests.unit.media import test_families as families

torch = pytest.importorskip("torch")

from relax_plugin_torch.routing_replay import RoutingReplay  # noqa: E402
from relax_plugin_transformers.engine import TransformersEngine  # noqa: E402

from relax_contrib.recipes import families as tiny  # noqa: E402
from relax_core.learn import PackedBatch  # noqa: E402

NEAR = 0.02
"""Share of tokens that rounding may send elsewhere: transformers' linear attention differs step by step."""


@pytest.fixture(scope="module", params=[one for one in tiny.MODEL_TYPES if "moe" in one])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> families.Model:
    return families.built(request.param, tmp_path_factory.mktemp(request.param) / "model", gate_std=0.5)


async def test_experts_of_tokens_and_media_are_replayed_at_their_positions(model: families.Model) -> None:
    own = routing(Path(model.folder))
    assert own == Routing(2, 2, 8)
    engine = TransformersEngine()
    await engine.start(model.engine_spec())
    try:
        asked = [replace(one, routed_experts=True) for one in model.requests()]
        told = await routed(engine, asked, own)
    finally:
        await engine.stop()
    said = {got.id: (list(got.tokens), [0.0] * len(got.tokens)) for got, _ in told}
    rows = families.rows(asked, said)
    lengths = rows.columns["tokens"].lengths
    values, known = zip(
        *(experts.between(0, int(length)) for (_, experts), length in zip(told, lengths, strict=True)), strict=True
    )
    assert all(part == b"\1" * (len(part) - 1) + b"\0" for part in known)
    experts = np.frombuffer(b"".join(values), np.uint8).reshape(-1, own.layers, own.top_k)
    valid = Ragged(np.frombuffer(b"".join(known), np.uint8), lengths)
    policy = model.policy()
    policy.routing_replay = RoutingReplay(policy.model)
    with torch.no_grad():
        plain = policy.score(PackedBatch(rows))["log_probs"]
        planned = rows.with_columns({"routed_experts": Ragged(experts, lengths), "routed_valid": valid})
        replayed = policy.score(PackedBatch(planned))["log_probs"]
        counted = {name: float(total / count) for name, (total, count) in policy.routing_replay.metrics().items()}
        others = Ragged((experts + 1) % own.experts, lengths)
        shifted = policy.score(PackedBatch(planned.with_columns({"routed_experts": others})))["log_probs"]
    assert counted["routing/replayed"] == 1.0 and counted["routing/differs"] <= NEAR
    if counted["routing/differs"] == 0.0:
        assert torch.equal(replayed, plain)
    assert (shifted - plain).abs().max() > 1e-2
