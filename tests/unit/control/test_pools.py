# SPDX-License-Identifier: Apache-2.0
"""Engine pools in a plan: where they live, who asks them, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Plan
from relax_core.config.compose import parse_config
from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue
from tests.unit.control import conftest

JUDGE: dict[str, Any] = {"name": "judge", "path": "j"}


POOL: dict[str, Any] = {"rewards": ["judge"], "engines": [JUDGE]}


def configured(catalogue: Catalogue, *overrides: str, **layer: Any) -> RunConfig:
    return conftest.configured(catalogue, *overrides, **POOL | layer)


def planned(catalogue: Catalogue, *overrides: str, on_gpus: bool = False, **layer: Any) -> Plan:
    return conftest.planned(catalogue, *overrides, on_gpus=on_gpus, **POOL | layer)


@pytest.mark.parametrize("placement", ["colocate", "hybrid", "async"])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_pool_has_devices_of_its_own_in_every_mode(catalogue: Catalogue, placement: str, on_gpus: bool) -> None:
    made = planned(catalogue, placement=placement, on_gpus=on_gpus, engines=[{**JUDGE, "count": 2}])
    pool = made.groups["engines-judge"]
    assert pool.size == 2 and len(pool.devices) == (2 if on_gpus else 1)
    assert made.neighbours("engines-judge") == () and pool.offloads == ()
    assert any(note.startswith("engine pool judge: 2 transformers engines with ") for note in made.notes)


@pytest.mark.parametrize("placement", ["colocate", "hybrid", "async"])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_pool_may_take_turns_on_the_rollouts_devices_in_every_mode(
    catalogue: Catalogue, placement: str, on_gpus: bool
) -> None:
    layout = {"mode": placement, "rollout": {"engines": 2}, "actor": {"ranks": 2}}
    made = planned(catalogue, placement=layout, on_gpus=on_gpus, engines=[{**JUDGE, "devices": "deferred"}])
    pool, rollout = made.groups["engines-judge"], made.groups["rollout"]
    assert pool.devices <= rollout.devices and "rollout" in made.neighbours("engines-judge")
    assert ("actor" in made.neighbours("engines-judge")) is (placement == "colocate")
    assert pool.offloads == rollout.offloads == (("kv", "weights") if on_gpus else ("kv",))
    assert any(
        "for reward judge; its turn on the rollout's devices comes when the rollout" in one for one in made.notes
    )
    own = planned(catalogue, placement=layout, on_gpus=on_gpus)
    assert len({name for group in own.groups.values() for name in group.devices}) == 1 + len(
        {name for group in made.groups.values() for name in group.devices}
    ), "it needs no device of its own"


def test_a_teachers_pool_takes_turns_for_whole_steps(catalogue: Catalogue) -> None:
    layer = {"algorithm": "distillation", "rewards": [], "teachers": [{"engine": "judge"}]}
    made = planned(catalogue, engines=[{**JUDGE, "devices": "shared"}], **layer)
    assert "rollout" in made.neighbours("engines-judge")
    assert any("its turn on the rollout's devices comes when a whole step waits for it" in note for note in made.notes)


def test_a_pool_on_shared_devices_fits_on_them_and_gives_its_memory_back(catalogue: Catalogue) -> None:
    with pytest.raises(
        ConfigError, match=r"engines\.judge\.devices: got shared: 2 .* on 2 GPUs, and the policy's have 1"
    ):
        planned(catalogue, placement="async", on_gpus=True, engines=[{**JUDGE, "count": 2, "devices": "shared"}])
    with pytest.raises(ConfigError, match="with gpus_per_engine = 0, while the policy has GPUs"):
        planned(catalogue, on_gpus=True, engines=[{**JUDGE, "gpus_per_engine": 0, "devices": "shared"}])
    from relax_plugin_transformers.engine import TransformersEngine

    from relax_core.api.engine import Capabilities

    own = Catalogue.load()
    own.add("engine", "sleepless", type("Sleepless", (TransformersEngine,), {"capabilities": Capabilities()}))
    with pytest.raises(ConfigError, match="sleepless, which can't offload memory"):
        planned(own, on_gpus=True, engines=[{**JUDGE, "engine": "sleepless", "devices": "shared"}])


def test_a_pools_engine_is_the_policys_by_default(catalogue: Catalogue) -> None:
    own = {"name": "sglang", "python": "/venv/python"}
    config = configured(catalogue, "engine=vllm", engines=[JUDGE, {"name": "other", "path": "o", "engine": own}])
    judge, other = config.engines
    assert config.backend_of(judge) == config.engine and config.backend_of(other).python == "/venv/python"
    assert config.backend_of(other).chosen.name == "sglang" and "python" not in config.backend_of(other).chosen.options
    assert parse_config(config.dump(), catalogue) == config


def test_a_teacher_behind_a_pool_needs_no_ranks(catalogue: Catalogue) -> None:
    layer = {"algorithm": "distillation", "rewards": [], "placement": "async"}
    one = planned(catalogue, teachers=[{"engine": "judge"}], on_gpus=True, **layer)
    assert {"actor", "rollout", "engines-judge"} == set(one.groups)
    both = [{"engine": "judge", "only": "d=x"}, {"path": "p", "only": "d=y"}]
    two = planned(catalogue, teachers=both, on_gpus=True, **layer)
    assert {"engines-judge", "teacher-1"} <= set(two.groups) and "teacher-0" not in two.groups


def test_a_pool_used_only_by_rewards_is_refused_in_a_run_without_samples(catalogue: Catalogue) -> None:
    assert "engines-judge" not in planned(catalogue, algorithm="sft").groups


LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"engines": []}, r"engines: got no pool 'judge', which reward judge uses; add a pool: \[\[engines\]\]"),
    ({"rewards": [{"name": "judge", "engine": "other"}]}, "got no pool 'other', .*the pools of .* are judge"),
    ({"rewards": ["exact"]}, r"engines\.0\.name: got judge, a pool without users"),
    ({"engines": [JUDGE, JUDGE]}, r"engines\.1\.name .*got judge; another pool has this name"),
    ({"engines": [{"name": "judge"}]}, r"engines\.0\.path"),
    ({"engines": [{**JUDGE, "engine": "nonesuch"}]}, r"engines\.0\.engine\.name .*got 'nonesuch'"),
    ({"engines": [{**JUDGE, "share": "actor"}]}, r"engines\.0\.share .*got an unknown key"),
    ({"engines": [{**JUDGE, "turn_requests": 8}]}, r'turn_requests.* got 8 with devices = "own"; remove this key'),
    ({"engines": [{**JUDGE, "devices": "deferred", "turn_requests": 8}]}, 'got 8 with devices = "deferred"'),
    ({"algorithm": "distillation", "teachers": [{"engine": "judge"}]}, "reward judge and teachers.0 use; a pool can't serve"),
    ({"teachers": [{"engine": "none"}]}, r"teachers\.0\.engine .*got 'none'; the pools of .* are judge"),
    ({"teachers": [{"engine": "judge", "path": "p"}]}, r"teachers\.0\.path .* and engine = 'judge'; remove one"),
    ({"teachers": [{}]}, r"teachers\.0 .*got neither path nor engine"),
    ({"rewards": [], "algorithm": {"name": "distillation", "mode": "loss", "tokens": "teacher-top-k"},
      "teachers": [{"engine": "judge"}]}, r"teachers\.0\.engine: got judge, to produce teacher_top_k_ids and"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "says"), LAYERS)
def test_impossible_pools_are_refused(catalogue: Catalogue, layer: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planned(catalogue, **layer)


def test_a_teachers_engine_must_score(catalogue: Catalogue) -> None:
    from relax_plugin_transformers.engine import TransformersEngine

    from relax_core.api.engine import Capabilities

    mute = type("Mute", (TransformersEngine,), {"capabilities": Capabilities()})
    own = Catalogue.load()
    own.add("engine", "mute", mute)
    layer = {"algorithm": "distillation", "rewards": [], "teachers": [{"engine": "judge"}]}
    with pytest.raises(ConfigError, match=r"teachers\.0\.engine: got judge: engine mute can't score given tokens"):
        planned(own, engines=[{**JUDGE, "engine": "mute"}], **layer)


def test_a_pools_engine_gets_the_same_settings_as_the_policys() -> None:
    """Adapters and frozen parts are of models that somebody trains."""
    from relax_core.engines.factories import auxiliary_spec

    config = configured(Catalogue.load(), "model.lora={rank=4}", "seed=7", engines=[{**JUDGE, "max_context": 32}])
    spec = auxiliary_spec(config, config.engines[0])
    assert spec.model["lora"] is None and spec.model["path"].endswith("/j") and spec.model["dtype"] == "float32"
    assert (spec.max_context, spec.seed, str(spec.version)) == (32, 7, "judge@0.0")
    assert config.backend_of(config.engines[0]).chosen == Chosen("engine", "transformers", config.engine.chosen.options)
