# SPDX-License-Identifier: Apache-2.0
"""From the algorithm's needs and the placement to roles, columns and worker groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.errors import ConfigError
from relax_core.api.plan import Plan
from relax_core.api.weights import Version
from relax_core.control.planner import plan
from relax_core.data.dataset import dataset_settings
from relax_core.engines.factories import engine_spec
from relax_core.registry.catalogue import Catalogue
from tests.unit.control import conftest

SCRIPT = """
from relax_core.api import (ADVANTAGES, ROLLOUT_LOG_PROBS, Algorithm, Column, Scope, Source, WEIGHT_VERSIONS)

class _Base(Algorithm):
    source = Source.ROLLOUT
    def columns(self): return frozenset({ADVANTAGES})
    def outputs(self): return frozenset()
    def advantages(self, groups): raise NotImplementedError
    def loss(self, batch, policy): raise NotImplementedError

class OverBatch(_Base):
    statistics = Scope.BATCH
    min_group_size = 3

class TwoCounts(_Base):
    denominators = frozenset({"tokens", "rows"})

class TokenCredit(_Base):
    def advantage_columns(self): return frozenset({ROLLOUT_LOG_PROBS, WEIGHT_VERSIONS})

class NeedsMore(_Base):
    def columns(self): return frozenset({ADVANTAGES, Column("unheard_of")})

class FromFile(_Base):
    source = Source.DATASET
    def columns(self): return frozenset()

class CreditedFile(_Base):
    source = Source.DATASET
"""


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    file = tmp_path_factory.mktemp("plugin") / "algorithms.py"
    file.write_text(SCRIPT)
    return Catalogue.load([str(file)])


def planned(catalogue: Catalogue, *overrides: str, algorithm: Any = "grpo") -> Plan:
    return conftest.planned(catalogue, *overrides, algorithm=algorithm, placement="hybrid")


def test_a_plain_run_has_three_roles_and_no_pass_beyond_the_update(catalogue: Catalogue) -> None:
    made = planned(catalogue)
    assert made.roles == ("rollout", "advantages", "actor")
    assert set(made.groups) == {"rollout", "actor"}
    assert "old_log_probs" not in made.trained_columns and not made.needs_old_log_probs
    assert made.max_staleness == 1 and made.min_valid == 2


def test_a_divergence_adds_the_reference_role_and_its_column(catalogue: Catalogue) -> None:
    made = planned(catalogue, "algorithm.kl_coef=0.1")
    assert "reference" in made.roles and "ref_log_probs" in made.trained_columns
    assert made.groups["reference"].size == 1
    assert made.has("reference.log_probs")


def test_a_reference_that_nothing_reads_is_refused(catalogue: Catalogue) -> None:
    planned(catalogue, "algorithm.kl_coef=0.1", "reference.path=other")
    with pytest.raises(
        ConfigError, match=r"reference\.path: got .*other; grpo, as configured, compares with no reference"
    ):
        planned(catalogue, "reference.path=other")


@pytest.mark.parametrize("several", ["updates_per_step", "passes"])
@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_several_updates_need_old_log_probs_from_the_role_with_devices(
    catalogue: Catalogue, mode: str, several: str
) -> None:
    made = planned(catalogue, f"batch.{several}=2", "algorithm.correction=truncate", f"placement.mode={mode}")
    assert made.needs_old_log_probs
    assert ("actor-fwd" in made.roles) == (mode == "async")
    assert ("old_log_probs" in made.trained_columns) == (mode == "async")


def test_engines_and_ranks_follow_the_placement(catalogue: Catalogue) -> None:
    made = planned(catalogue, "placement.rollout.engines=3", "placement.rollout.threads=2", "placement.actor.ranks=2")
    assert (made.groups["rollout"].size, made.groups["rollout"].threads, made.groups["actor"].size) == (3, 2, 2)


def test_the_actor_streams_if_no_setting_prevents_it(catalogue: Catalogue) -> None:
    made = planned(catalogue)
    assert made.streams and not any("streaming" in note for note in made.notes)
    apart = planned(catalogue, "placement.mode=async", "algorithm.kl_coef=0.1", "placement.reference.ranks=3")
    assert apart.streams and not any("streaming" in note for note in apart.notes)
    assert apart.groups["reference"].size == 3 and "actor-fwd" not in apart.roles


@pytest.mark.parametrize(("override", "algorithm", "says"), [
    ("batch.stream=false", "grpo", "batch.stream is false"),
    ("deterministic=true", "grpo", "deterministic"),
    ("batch.updates_per_step=2", "grpo", "batch.updates_per_step is 2"),
    ("batch.passes=2", "grpo", "batch.passes is 2"),
    ("placement.mode=colocate", "grpo", "shares its devices"),
    ("seed=1", "over-batch", "statistics over the whole batch"),
    ("seed=1", "two-counts", "divided by rows and tokens"),
    ("seed=1", "token-credit", "does not say what its loss is divided by"),
])  # fmt: skip
def test_the_plan_reports_why_a_step_does_not_stream(
    catalogue: Catalogue, override: str, algorithm: str, says: str
) -> None:
    on_policy = ("max_staleness=0",) if override in ("deterministic=true", "placement.mode=colocate") else ()
    made = planned(catalogue, override, *on_policy, algorithm=algorithm)
    assert not made.streams
    if algorithm == "over-batch":
        assert made.batch_statistics and made.min_valid == 3
    assert any("no streaming" in note and says in note for note in made.notes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("placement.mode=colocate", "placement: got engines that take turns on their devices with actor"),
        ("deterministic=true", "deterministic: got true; results depend on the number of engines"),
        ("run.runner=inline", "run.runner: got 'inline'"),
    ],
)
def test_a_pool_that_no_engine_can_join_takes_none_from_elsewhere(
    catalogue: Catalogue, override: str, message: str
) -> None:
    external = (
        'placement.rollout.external={addresses=["127.0.0.1:8701"],token="file:token"}',
        "weights.proof=behaviour",
    )
    planned(catalogue, *external)
    with pytest.raises(ConfigError, match=message):
        planned(catalogue, *external, override, "max_staleness=0")


def test_crediting_reads_the_columns_that_the_algorithm_declares(catalogue: Catalogue) -> None:
    assert planned(catalogue).advantage_columns == ("loss_mask", "rewards", "tokens")
    asked = planned(catalogue, algorithm="token-credit").advantage_columns
    assert asked == ("loss_mask", "rewards", "rollout_log_probs", "tokens", "weight_versions")


@pytest.mark.parametrize("name", ["exact", "exact/words", "environment"])
def test_rewards_that_an_algorithm_names_are_known(catalogue: Catalogue, name: str) -> None:
    assert planned(catalogue, algorithm={"name": "gdpo", "weights": {name: 0.5}}).batch_statistics


@pytest.mark.parametrize("name", ["exct", "environment/x", "words"])
def test_a_reward_that_an_algorithm_names_but_the_run_has_not_is_refused(catalogue: Catalogue, name: str) -> None:
    with pytest.raises(ConfigError, match=f"the reward '{name}'; name one of exact, environment, or REWARD/PART"):
        planned(catalogue, algorithm={"name": "gdpo", "weights": {name: 0.5}})


def test_columns_without_a_role_are_refused_also_where_nothing_is_credited(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigError, match="'unheard_of'"):
        planned(catalogue, algorithm="needs-more")
    with pytest.raises(ConfigError, match="'rewards'"):
        planned(catalogue, algorithm="credited-file")


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "async"])
def test_rows_of_a_file_need_no_engines_no_credit_and_no_publishing(catalogue: Catalogue, mode: str) -> None:
    made = planned(catalogue, f"placement={mode}", algorithm="from-file")
    assert made.roles == ("source", "actor") and set(made.groups) == {"actor"}
    assert made.trained_columns == ("loss_mask", "tokens") and not made.publishes and not made.streams
    assert (made.group_size, made.min_valid, made.producer) == (1, 1, "source")
    assert made.notes == ()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("algorithm=sft", "data.max_prompt_tokens=9"), ["data.max_prompt_tokens: no effect, for sampled rows"]),
        (
            ("data.train_on=all", "data.max_row_tokens=9"),
            ["data.max_row_tokens and data.train_on: no effect, for rows of"],
        ),
        (("eval.size=9",), []),
        (
            ("eval.size=9", 'eval.sets=[{name="held", path="held.jsonl"}]'),
            ["eval.size: no effect, for tasks held out of data.train"],
        ),
    ],
)
def test_the_plan_names_the_keys_that_have_no_effect(
    catalogue: Catalogue, overrides: tuple[str, ...], says: list[str]
) -> None:
    notes = [note for note in planned(catalogue, *overrides).notes if "no effect" in note]
    assert len(notes) == len(says) and all(map(str.startswith, notes, says))


def test_the_plan_tells_of_the_short_context_of_a_model_with_two_sets_of_positions(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    rope = {"rope_type": "longrope", "long_factor": [2.0], "original_max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 131072, "rope_parameters": rope}))
    made = conftest.configured(catalogue, f"model.path={tmp_path}", "data.max_row_tokens=9000")
    (note,) = [note for note in plan(made, catalogue).notes if "context" in note]
    assert note.startswith("the model's context is 4096 tokens (longrope in config.json: beyond original_max_")
    assert engine_spec(made, Version("actor", 0, 0)).max_context == 4096  # vLLM chooses its set by this number
    assert dataset_settings(made, catalogue.build, "rows.jsonl").max_row_tokens == 4096


def test_pairs_are_groups_of_two_and_can_read_the_reference(catalogue: Catalogue) -> None:
    made = planned(catalogue, algorithm="dpo")
    assert made.roles == ("source", "reference", "actor") and not made.publishes
    assert made.trained_columns == ("loss_mask", "ref_log_probs", "tokens")
    assert (made.group_size, made.min_valid) == (2, 2)


def test_rows_kept_ahead_of_a_dataset_do_not_depend_on_staleness(catalogue: Catalogue) -> None:
    ahead = [planned(catalogue, f"max_staleness={k}", algorithm="from-file").max_staleness for k in (0, 4)]
    assert ahead == [1, 1]


def test_every_mode_plans_the_same_operations(catalogue: Catalogue) -> None:
    kl = "algorithm.kl_coef=0.1"
    modes = [planned(catalogue, kl, f"placement={mode}").operations for mode in ("colocate", "hybrid", "async")]
    assert modes[0] == modes[1] == modes[2]


def test_a_divergence_in_the_reward_brings_the_reference_before_the_advantages(catalogue: Catalogue) -> None:
    made = planned(catalogue, algorithm={"name": "rloo", "reward_kl_coef": 0.05})
    order = [operation.name for operation in made.operations]
    assert order.index("reference.log_probs") < order.index("advantages.compute") < order.index("actor.fit")
    assert {"ref_log_probs", "rollout_log_probs"} <= set(made.advantage_columns)
