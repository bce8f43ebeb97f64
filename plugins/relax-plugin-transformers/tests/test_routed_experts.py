# SPDX-License-Identifier: Apache-2.0
"""Which experts tokens visited: told by position, the same as in a plain forward, whatever rows do in their batch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relax_core.api.engine import Delta
from relax_core.api.family import Routing
from relax_core.engines.requests import RoutedExperts
from relax_core.testing.engine_fixture import PROMPTS, EngineFixture, agrees
from relax_core.testing.moe import EXPERTS, LAYERS, TOP_K, plain_experts, routed, tiny_moe

ROUTING = Routing(LAYERS, TOP_K, EXPERTS)


StartLab = Callable[..., EngineFixture]


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_moe plain", "mixtral", "olmoe"])
def lab(request: pytest.FixtureRequest, labs: StartLab, tmp_path_factory: pytest.TempPathFactory) -> EngineFixture:
    folder = tmp_path_factory.mktemp("moe")
    folders = [tiny_moe(str(folder / str(seed)), seed, request.param) for seed in (1, 2)]
    return labs(*folders, options={"deltas_every": 4, "max_prefill_tokens": 24})


def as_array(experts: RoutedExperts, count: int) -> np.ndarray:
    values, known = experts.between(0, count)
    assert known == b"\1" * count
    return np.sort(np.frombuffer(values, ROUTING.dtype).reshape(count, LAYERS, TOP_K), -1)


def check(folder: str, prompt: tuple[int, ...], got: Delta, experts: RoutedExperts) -> None:
    fed = (*prompt, *got.tokens)[:-1]
    assert len(experts) == len(fed)
    np.testing.assert_array_equal(as_array(experts, len(fed)), plain_experts(folder, fed))


def test_every_computed_position_reports_its_experts(lab: EngineFixture) -> None:
    requests = [
        lab.request(prompt, 3 + 9 * (i % 3), seed=i, routed_experts=i != 1) for i, prompt in enumerate(PROMPTS * 2)
    ]
    for request, (got, experts) in zip(requests, lab.run(routed(lab.engine, requests, ROUTING)), strict=True):
        if request.routed_experts:
            check(lab.model, request.tokens, got, experts)
        else:
            assert len(experts) == 0


def test_experts_are_published_by_name_and_read_as_the_folder_has_them(lab: EngineFixture) -> None:
    assert lab.facts["fingerprint"] == lab.publish(source=lab.model).fingerprint
    manifest = lab.publish()
    assert any(".experts.0." in info.name for info in manifest.tensors)
    assert lab.update(manifest).fingerprint == manifest.fingerprint
    request = lab.request(PROMPTS[0], 8, seed=3, routed_experts=True)
    ((got, experts),) = lab.run(routed(lab.engine, [request], ROUTING))
    check(lab.other, request.tokens, got, experts)
    (plain,) = lab.generate(lab.request(PROMPTS[0], 8, seed=3))
    agrees(lab.other, PROMPTS[0], plain)


def test_weights_that_slept_are_loaded_again_into_the_same_experts(tmp_path: Path, start_lab: StartLab) -> None:
    lab = start_lab(*(tiny_moe(str(tmp_path / str(seed)), seed) for seed in (1, 2)))
    assert lab.run(lab.engine.offload(["weights"])) > 0
    lab.run(lab.engine.onload(["weights"]))
    manifest = lab.publish()
    assert lab.update(manifest).resident == manifest.fingerprint
    (got,) = lab.generate(lab.request(PROMPTS[0], 8, seed=3))
    agrees(lab.other, PROMPTS[0], got)


def test_a_model_without_routers_says_so(folders: tuple[str, str], start_lab: StartLab) -> None:
    dense = start_lab(*folders)
    with pytest.raises(ValueError, match="no routers"):
        dense.generate(dense.request(PROMPTS[0], 2, routed_experts=True))
