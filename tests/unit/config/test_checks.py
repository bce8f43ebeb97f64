# SPDX-License-Identifier: Apache-2.0
"""Combinations and files that can't work are refused before anything starts, together and each with a fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from relax_core.api import Proposal, ScalingPolicy
from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.source import Sampler
from relax_core.config.compose import compose
from relax_core.config.problems import ConfigProblems
from relax_core.registry.catalogue import Catalogue


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.group_size=1"], "rollout.group_size (command line): got 1; grpo compares"),
        (
            ["max_staleness=some"],
            "max_staleness (command line): got 'some'; input should be a valid integer, or input should be 'unbounded'",
        ),
        (["max_staleness=1", "deterministic=true"], "deterministic = true needs max_staleness = 0"),
        (["placement=async", "algorithm=on-policy"], "on-policy is only correct up to a staleness of 0"),
        (["placement=async", "algorithm=on-policy", "max_staleness=unbounded"], "got unbounded; on-policy is only"),
        (["algorithm=on-policy", "batch.updates_per_step=2"], "got 2; on-policy is only correct with up to 1 updates"),
        (["algorithm=on-policy", "batch.passes=3"], "batch.passes (command line): got 3; on-policy is only correct"),
        (["rewards=[]", "algorithm=sft", "batch.passes=2"], "batch.passes (command line): got 2; sft has no ratio"),
        (["batch.updates_per_step=33"], "a step has rollout.groups_per_step = 32 groups"),
        (["rewards=[]"], "rewards (command line): got nothing; environment single-turn gives no reward"),
        (["rewards.0.weight=0"], "all weights are 0"),
        (["eval.temperature=0", "eval.samples=4"], "eval.samples (command line): got 4; temperature 0"),
        (['eval.sets=[{name="a", path="x"}, {name="a", path="y"}]'], "2 sets named 'a'"),
        (["rollout.token_budget=8"], "at least rollout.max_new_tokens = 16"),
        (["rollout.kv_across_versions=true"], "rollout.kv_across_versions (command line): got True; tokens become"),
        (
            ["rollout.kv_across_versions=true", "placement=async", "engine=vllm"],
            "rollout.kv_across_versions (command line): got True; engine vllm recomputes its KV cache",
        ),
        (["weights.proof=behaviour"], "got behaviour; engine transformers cannot score given tokens"),
        (["weights.proof=resident"], "got resident; engine transformers cannot check the weights in its memory"),
        (["weights.payload=delta"], "got delta; choose a payload that transport shared-memory supports: full"),
        (["critic.lr=1e-5"], "critic (command line): got lr; grpo trains no critic: remove this table"),
        (["placement.critic.ranks=2"], "placement.critic (command line): got ranks of its own; grpo trains no critic"),
        (["placement.actor_fwd.ranks=2"], "placement.actor_fwd (command line): got ranks of its own"),
        (["placement.actor.share=rollout"], "placement.actor.share (command line): got 'rollout'"),
        (
            ["batch.tokens_per_micro_batch=8"],
            "batch.tokens_per_micro_batch (command line): got 8; a row has up to 17 tokens",
        ),
        (
            ["rewards=[]", "algorithm=sft", "guards.reward.action=stop"],
            "guards.reward (command line): got a guard on reward/mean; sft trains on the rows of a dataset",
        ),
        (["placement.actor.ranks=5000"], "placement.actor.ranks (command line): got 5000; an update has"),
    ],
)
def test_an_impossible_combination_is_refused(
    folder: Path, catalogue: Catalogue, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["my.toml"], overrides, catalogue, on_disk=False)
    assert message in str(caught.value)


class Orders(Sampler):
    """The easiest task, always."""

    def pick(self, group: int, num_tasks: int, seed: int) -> int:
        return 0


class TwoEngines(ScalingPolicy):
    """Propose two engines, always."""

    def decide(self, state, signals, now):
        return state, Proposal(2, "two are enough")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm=sft", "rewards=[]"],
            "autoscale.name (command line): got two; sft trains on the rows of a dataset",
        ),
        (["autoscale.min_engines=1"], "a former key; rename it to placement.rollout.min_engines"),
        (
            ["placement=hybrid", "placement.rollout.engines=9"],
            "placement.rollout.engines (command line): got 9; the scaling policy keeps at most",
        ),
    ],
)
def test_a_scaling_policy_needs_engines_within_its_limits(
    folder: Path, with_faults: Catalogue, overrides: list[str], message: str
) -> None:
    with_faults.add("scaling-policy", "two", TwoEngines)
    with pytest.raises(ConfigError) as caught:
        compose(["my.toml"], ["autoscale=two", *overrides], with_faults, on_disk=False)
    assert message in str(caught.value)
    compose(["my.toml"], ["autoscale=two", "placement=hybrid"], with_faults, on_disk=False)


def test_a_run_that_scales_needs_the_plugin_that_scales(folder: Path) -> None:
    """The error comes before the run starts, and names the plugin."""
    catalogue = Catalogue.load(environ={**os.environ, "RELAX_DISABLE_PLUGINS": "relax-plugin-scaling"})
    catalogue.add("scaling-policy", "two", TwoEngines)
    external = "placement.rollout.external={addresses=['127.0.0.1:8701'],token='file:token'}"
    with pytest.raises(ConfigProblems) as caught:
        compose(
            ["my.toml"],
            ["autoscale=two", "placement=hybrid", external, "weights.proof=behaviour"],
            catalogue,
            on_disk=False,
        )
    absent = "relax-plugin-scaling 0.1.0 does not load (switched off"
    assert [error.got for error in caught.value.errors if error.fix.startswith(absent)] == ["two", "127.0.0.1:8701"]


@pytest.mark.parametrize(
    ("external", "overrides", "message"),
    [
        ('{addresses=["127.0.0.1:8701"]}', [], "placement.rollout.external.token: got nothing; set"),
        ('{token="file:token"}', [], "placement.rollout.external.token (command line): got a token without addresses"),
        ('{addresses=["8701"],token="file:token"}', [], "external.addresses.0 (command line): got '8701'; give HOST:PORT"),
        ('{addresses=["a:0"],token="file:token"}', [], "external.addresses.0 (command line): got 'a:0'; give HOST:PORT"),
        (
            '{addresses=["10.0.0.2:8701"],token="file:token"}', [],
            "weights.name: got shared-memory; only engines of this machine can read them",
        ),
        (
            '{addresses=["127.0.0.1:8701"],token="file:token"}', ["weights.proof=auto"],
            'weights.proof (command line): got auto; set "behaviour"',
        ),
        (
            '{addresses=["127.0.0.1:8701"],token="file:token"}', ["algorithm=sft", "rewards=[]"],
            "placement.rollout.external (command line): got a table, with algorithm sft",
        ),
    ],
)  # fmt: skip
def test_engines_from_elsewhere_need_addresses_a_token_and_a_canary(
    folder: Path, with_faults: Catalogue, external: str, overrides: list[str], message: str
) -> None:
    given = [f"placement.rollout.external={external}", "weights.proof=behaviour", *overrides]
    with pytest.raises(RelaxError) as caught:
        compose(["my.toml"], given, with_faults, on_disk=False)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["sampler=orders", "data.shuffle=false"],
            "data.shuffle (command line): got False; the order of the file replaces the sampler orders",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(
    folder: Path, with_faults: Catalogue, overrides: list[str], message: str
) -> None:
    with_faults.add("sampler", "orders", Orders)
    with pytest.raises(ConfigError) as caught:
        compose(["my.toml"], overrides, with_faults, on_disk=False)
    assert message in str(caught.value)
    compose(["my.toml"], overrides[:-1], with_faults, on_disk=False)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rewards=[]", "environment=game"],
        ["rewards=[]", "algorithm=sft"],
        ["algorithm=on-policy", "rollout.group_size=1"],
        ["placement=async", "placement.reference.ranks=2"],
        ["placement=hybrid", "max_staleness=unbounded"],
    ],
)
def test_a_possible_one_is_not(folder: Path, catalogue: Catalogue, overrides: list[str]) -> None:
    assert compose(["my.toml"], overrides, catalogue).config.steps == 200


def test_all_impossible_combinations_are_reported_at_once(folder: Path, catalogue: Catalogue) -> None:
    with pytest.raises(ConfigProblems) as caught:
        compose(["my.toml"], ["rollout.group_size=1", "rollout.token_budget=8", "data.train=absent"], catalogue)
    assert len(caught.value.errors) == 3


def refused(catalogue: Catalogue, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(["my.toml"], overrides, catalogue)
    return str(caught.value)


def test_a_context_longer_than_the_models_is_refused(folder: Path, catalogue: Catalogue) -> None:
    assert "context is 64 tokens" in refused(catalogue, "rollout.max_new_tokens=64")
    longer = 'eval.sets=[{name="a", path="train.jsonl"}, {name="b", path="train.jsonl", max_new_tokens=64}]'
    assert "eval.sets.1.max_new_tokens (command line): got 64; the model's context is 64" in refused(catalogue, longer)
    assert "which is 65 together" in refused(catalogue, "data.max_prompt_tokens=49")
    assert "set 64 or less" in refused(catalogue, "rollout.token_budget=65")
    (folder / "model/config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 16}}))
    assert "context is 16 tokens" in refused(catalogue)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "longrope", "long_factor": [2.0]}, "original_max_position_embeddings": 16},
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0], "original_max_position_embeddings": 16}},
        {"rope_parameters": {"full": {"long_factor": [2.0], "original_max_position_embeddings": 16}, "window": {}}},
    ],
    ids=["as saved once", "as saved today", "by kind of layer"],
)
@pytest.mark.parametrize("nested", [False, True], ids=["text", "multimodal"])
def test_rows_that_would_change_the_positions_of_their_neighbours_are_refused(
    folder: Path, catalogue: Catalogue, keys: dict[str, Any], nested: bool
) -> None:
    text = {"max_position_embeddings": 64, **keys}
    (folder / "model/config.json").write_text(json.dumps({"text_config": text} if nested else text))
    reason = (
        "context is 16 tokens (longrope in config.json: beyond original_max_position_embeddings = 16, a row changes"
    )
    said = refused(catalogue, "rollout.max_new_tokens=16")
    assert "rollout.max_new_tokens (command line): got 16" in said and reason in said
    assert reason in refused(catalogue, "rollout.token_budget=17", "rollout.max_new_tokens=8")
    compose(["my.toml"], ["rollout.max_new_tokens=8"], catalogue)


def test_writable_folders_exist_and_are_not_the_whole_machine(folder: Path, catalogue: Catalogue) -> None:
    for value in ("absent", "train.jsonl", "/"):
        said = refused(
            catalogue, f'environment={{name="single-turn", isolation="shared", writable=["model", "{value}"]}}'
        )
        assert "environment.writable.1" in said and "name an existing folder" in said
    config = compose(
        ["my.toml"], ['environment={name="single-turn", isolation="shared", writable=["model"]}'], catalogue
    )
    assert config.config.environment.writable == (folder / "model",)


def test_a_missing_or_broken_model_folder_is_refused(folder: Path, catalogue: Catalogue) -> None:
    absent = refused(catalogue, "model.path=absent")
    assert "does not exist" in absent and "hf download" not in absent
    hub = refused(catalogue, "model.path=Qwen/Qwen3-0.6B")
    assert f"hf download Qwen/Qwen3-0.6B --local-dir {folder / 'Qwen/Qwen3-0.6B'}" in hub
    assert "a file" in refused(catalogue, "model.path=train.jsonl")
    model = folder / "model"
    (model / "tokenizer.json").unlink()
    assert "without tokenizer.json" in refused(catalogue)
    (model / "model.safetensors").write_bytes(b"")
    assert "without weights" in refused(catalogue)
    (model / "config.json").write_text("{")
    text = refused(catalogue)
    assert "config.json, which can't be read" in text and text.count("model.path (my.toml:3)") == 3
    (model / "config.json").unlink()
    assert "without config.json" in refused(catalogue)


def test_weights_that_were_not_downloaded_to_their_end_are_refused(folder: Path, catalogue: Catalogue) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    whole = len(header).to_bytes(8, "little") + header + bytes(16)
    file = folder / "model/model.safetensors"
    file.write_bytes(whole[:-1])
    assert f"which is cut short: it has {len(whole) - 1} of {len(whole)} bytes" in refused(catalogue)
    file.write_bytes(whole[:30])
    assert "which ends within its header" in refused(catalogue)
    file.write_bytes(bytes([4, 0, 0, 0, 0, 0, 0, 0]) + b"[}{]")
    assert "model.safetensors, which can't be read" in refused(catalogue)
    (folder / "model/second.safetensors").write_bytes(b"")
    assert "second.safetensors, which ends within its header" in refused(catalogue)


def test_a_missing_task_file_or_interpreter_is_refused(folder: Path, catalogue: Catalogue) -> None:
    text = refused(catalogue, "data.train=no.jsonl", "engine.python=no", 'eval.sets=[{name="a", path="no"}]')
    for key in ("data.train", "engine.python", "eval.sets.0.path"):
        assert f"{key} (command line)" in text


@pytest.mark.parametrize(
    ("labels", "runner", "message"),
    [
        ('{market="spot"}', "local", "placement.elastic_labels (command line): got labels, with the runner 'local'"),
        ('{market="!spot"}', "ray", "placement.elastic_labels (command line): got 'market' = '!spot'; give names"),
        ('{"in(a)"="spot"}', "ray", "placement.elastic_labels (command line): got 'in(a)' = 'spot'; give names"),
    ],
)  # fmt: skip
def test_labels_of_nodes_need_ray_and_plain_names(
    folder: Path, with_faults: Catalogue, labels: str, runner: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["my.toml"], [f"placement.elastic_labels={labels}", f"run.runner={runner}"], with_faults, on_disk=False)
    assert message in str(caught.value)
    spot = 'placement.elastic_labels={market="spot", "cloud.example/pool"="a-1"}'
    composed = compose(["my.toml"], [spot, "run.runner=ray"], with_faults, on_disk=False)
    assert dict(composed.config.placement.elastic_labels) == {"market": "spot", "cloud.example/pool": "a-1"}
