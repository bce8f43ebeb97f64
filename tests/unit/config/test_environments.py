# SPDX-License-Identifier: Apache-2.0
"""`[[environments]]`: further ones by name, each with an algorithm of its own; what can't work together is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.config.compose import compose, parse_config
from relax_core.config.run_config import RunConfig
from relax_core.control.planner import plan
from relax_core.registry.catalogue import Catalogue


@pytest.fixture
def layer(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "?", "answer": "a"}) + "\n")
    return {"model": {"path": str(tmp_path)}, "data": {"train": str(tmp_path / "train.jsonl")}, "algorithm": "grpo",
            "rollout": {"max_new_tokens": 4, "group_size": 4}, "eval": {"every": 0}, "rewards": ["exact"]}  # fmt: skip


def composed(layer: dict[str, Any], catalogue: Catalogue, *overrides: str, **more: Any) -> RunConfig:
    return compose([{**layer, **more}], overrides, catalogue, on_disk=False).config


def game(algorithm: Any = None, **options: Any) -> dict[str, Any]:
    return {"name": "guess-number", **options, **({} if algorithm is None else {"algorithm": algorithm})}


def test_environments_share_the_runs_algorithm_by_default(layer, installed) -> None:
    for environments in ([], ["guess-number"], [game(size=4)], [game("grpo")]):
        config = composed(layer, installed, environments=environments)
        assert config.learner == config.algorithm.chosen and config.algorithms == (config.algorithm.chosen,)
        assert parse_config(config.dump(), installed) == config


def test_an_environment_has_an_algorithm_by_name_or_with_its_options(layer, installed) -> None:
    for told in ("gigpo", {"name": "gigpo"}, {"name": "gigpo", "gamma": 0.5}):
        config = composed(layer, installed, environments=[game(told, size=4)])
        run, own = config.algorithms
        assert (run.name, own.name) == ("grpo", "gigpo")
        assert own.options["gamma"] == (0.5 if "gamma" in told else 0.95)
        assert config.learner.parts == (run, own)
        assert config.environments[0].chosen.options["size"] == 4
        assert [config.algorithm_of(name) for name in ("", "single-turn", "guess-number")] == [0, 0, 1]
        assert parse_config(config.dump(), installed) == config
    config = composed(
        layer, installed, "environments.0.algorithm=gigpo", "environments.0.size=5", environments=[game()]
    )
    assert config.algorithms[1].name == "gigpo"


def test_environments_of_one_name_are_distinguished_by_labels(layer, installed) -> None:
    both = [game(size=4), game("gigpo", size=5, label="hard")]
    config = composed(layer, installed, environments=both)
    assert [config.algorithm_of(name) for name in ("guess-number", "hard")] == [0, 1]
    assert parse_config(config.dump(), installed) == config
    composed(layer, installed, environment=game(label="easy"), environments=[game()])
    for second, field in ((game(), "name"), (game(label="guess-number"), "label")):
        with pytest.raises(ConfigError, match=rf"environments\.0\.{field}.*'guess-number'.* another label"):
            composed(layer, installed, environment=game(), environments=[second])


def test_rewards_of_one_name_are_refused_until_one_has_a_label(layer, installed) -> None:
    with pytest.raises(
        ConfigError, match=r"rewards\.1\.name .python.: got a second 'exact'; .*give one of the two a label"
    ):
        composed(layer, installed, rewards=["exact", "exact"])
    with pytest.raises(
        ConfigError, match=r"rewards\.0\.label .python.: got 'mean'; reward/mean is a metric of the core"
    ):
        composed(layer, installed, rewards=[{"name": "exact", "label": "mean"}])
    config = composed(layer, installed, rewards=["exact", {"name": "exact", "label": "strict"}])
    assert [reward.known_as for reward in config.rewards] == ["exact", "strict"]


@pytest.mark.parametrize(("told", "field", "says"), [
    ({"name": "gigpo", "gama": 1}, r"environments\.0\.algorithm\.gama", "gamma"),
    ({"name": "gigpo", "gamma": 7.0}, r"environments\.0\.algorithm\.gamma", "7"),
    ("gigp", r"environments\.0\.algorithm\.name", "gigpo"),
    ({"gamma": 0.5}, r"environments\.0\.algorithm\.name", "nothing"),
    ("ppo", r"environments\.0\.algorithm", "trains a critic"),
    ("remax", r"environments\.0\.algorithm", "greedy sample"),
    ("sft", r"environments\.0\.algorithm", "train on generated samples"),
])  # fmt: skip
def test_an_algorithm_that_cannot_be_mixed_with_the_runs_is_refused(
    layer, installed, told: Any, field: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=field) as raised:
        composed(layer, installed, environments=[game(told)])
    assert says in str(raised.value)


def test_every_algorithm_s_own_bounds_hold(layer, installed) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_size.*gigpo compares"):
        composed(layer, installed, "algorithm=reinforce", "rollout.group_size=1", environments=[game("gigpo")])
    config = composed(layer, installed, "max_staleness=3", environments=[game("gigpo")])
    assert config.staleness == 3


def test_an_environment_s_processes_are_options_of_its_table(layer, installed) -> None:
    own = {"isolation": "sample", "workers": 3, "timeout_s": 5.0, "memory_mb": 512, "retries": 1}
    config = composed(layer, installed, environment={"name": "guess-number", "size": 4, **own})
    assert {name: getattr(config.environment, name) for name in own} == own
    assert config.environment.chosen.options["size"] == 4
    assert parse_config(config.dump(), installed) == config
    assert composed(layer, installed, environments=[game(**own)]).environments[0].memory_mb == 512


def test_processes_of_an_environment_that_has_none_are_refused(layer, installed) -> None:
    for key, value in (("workers", 2), ("memory_mb", 512)):
        with pytest.raises(ConfigError, match=rf'environments\.0\.{key}.*isolation = "shared"'):
            composed(layer, installed, environments=[game(**{key: value})])


def test_the_plan_reads_what_any_of_them_reads(layer, installed) -> None:
    config = composed(layer, installed, environments=[game({"name": "gigpo", "kl_coef": 0.1})])
    made = plan(config, installed, on_gpus=False)
    assert {"ref_log_probs", "algorithm_index"} <= set(made.trained_columns)
    assert {"turns", "states", "step_rewards", "algorithm_index"} <= set(made.advantage_columns)
    assert "reference" in made.roles and not made.streams
    alone = plan(composed(layer, installed, environments=["guess-number"]), installed, on_gpus=False)
    assert alone == plan(composed(layer, installed), installed, on_gpus=False)
