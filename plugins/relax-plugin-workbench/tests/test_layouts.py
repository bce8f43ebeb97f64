# SPDX-License-Identifier: Apache-2.0
"""Layouts of a trainer are compared: what fits first by time, and what does not fit or work with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_plugin_workbench import layouts
from relax_plugin_workbench.layouts import LayoutComparison, Machine, compare, trainer_groups
from relax_plugin_workbench.memory import LIBRARIES, gib
from safetensors.numpy import save_file
from typer.testing import CliRunner

from relax_core.api import Estimate
from relax_core.api.errors import ConfigError
from relax_core.cli.main import app
from relax_core.config.compose import compose
from relax_core.control.planner import plan
from relax_core.registry.catalogue import Catalogue
from tests.ascii_tokenizer import save_ascii_tokenizer

MODEL = {
    "model_type": "qwen3", "num_hidden_layers": 6, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 4096, "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
GIB = 1 << 30


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tmp_path = tmp_path_factory.mktemp("run")
    save_ascii_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    save_file({"model.norm.weight": np.ones(1024, np.float16)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 4)
    return {
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"}, "data": {"train": str(tmp_path / "tasks.jsonl")},
        "algorithm": "grpo", "engine": "transformers", "trainer": "megatron", "rewards": ["exact"],
        "placement": "hybrid", "rollout": {"groups_per_step": 8, "group_size": 2, "max_new_tokens": 1000},
        "eval": {"every": 0},
    }  # fmt: skip


def with_gpus(gib: float, **changes: float) -> Machine:
    rates = {"flops_per_s": 1e14, "memory_bytes_per_s": 1e12, "link_bytes_per_s": 1e11, **changes}
    return Machine(4, True, 0, int(gib * GIB), **rates)


def comparison(configuration: dict[str, Any], machine: Machine, *overrides: str) -> LayoutComparison:
    catalogue = Catalogue.load()
    ranks = {"placement.actor.ranks": 4, "placement.reference.ranks": 4}
    placed = [*overrides, *(f"{key}={value}" for key, value in ranks.items())]
    config = compose([configuration], placed, catalogue, on_disk=False).config
    return compare(config, catalogue, plan(config, catalogue, on_gpus=machine.on_gpus), 24, machine, ranks)


def test_layouts_that_fit_come_first_in_the_order_of_their_time(configuration: dict[str, Any]) -> None:
    found = comparison(configuration, with_gpus(1.5))
    count = len(found.fitting)
    assert 0 < count < len(found.layouts)
    assert found.layouts[:count] == found.fitting
    assert [one.seconds for one in found.fitting] == sorted(one.seconds for one in found.fitting)
    assert all(0 < one.needed <= one.available == 1.5 * GIB for one in found.fitting)
    assert len(found.best_of_options()) < count
    found.check()


def test_refused_layouts_are_grouped_by_reason_the_closest_first(configuration: dict[str, Any]) -> None:
    refusals = comparison(configuration, with_gpus(1.5)).refusals()
    heads = refusals["trainer.tensor_parallel 4", "it must divide the 2 key-value heads of the model"]
    assert {one.layout.options["tensor_parallel"] for one in heads} == {4}
    assert ("trainer.pipeline_parallel 4", "it must divide the 6 layers of the model") in refusals
    large = refusals["memory", "the largest part is activations"]
    assert [one.needed for one in large] == sorted(one.needed for one in large)
    assert all(one.needed > 1.5 * GIB for one in large)


def test_a_machine_on_which_no_layout_fits_is_refused_with_the_closest_need(configuration: dict[str, Any]) -> None:
    found = comparison(configuration, with_gpus(0.01))
    assert not found.fitting
    least = gib(min(one.needed for one in found.layouts if one.needed))
    with pytest.raises(ConfigError, match=rf"none fits; the closest needs {least} of 10 MiB; use more GPUs"):
        found.check()


def test_slow_links_favour_layouts_that_send_less(configuration: dict[str, Any]) -> None:
    def best(link: float) -> dict[str, Any]:
        return dict(comparison(configuration, with_gpus(64.0, link_bytes_per_s=link)).fitting[0].layout.options)

    slow = best(1e6)
    assert slow["tensor_parallel"] == 1
    assert slow["pipeline_parallel"] == 2  # a pipeline sends hidden states only
    assert best(1e15)["pipeline_parallel"] == 1  # nothing waits for stages


def test_a_reference_is_placed_on_as_many_ranks_and_takes_its_time(configuration: dict[str, Any]) -> None:
    alone = comparison(configuration, with_gpus(8.0)).fitting[0]
    catalogue = Catalogue.load()
    config = compose([configuration], ["algorithm.kl_coef=0.01"], catalogue, on_disk=False).config
    assert trainer_groups(plan(config, catalogue, on_gpus=True)) == ["actor", "reference"]
    both = comparison(configuration, with_gpus(8.0), "algorithm.kl_coef=0.01")
    same = next(one for one in both.fitting if one.layout == alone.layout)
    assert same.seconds > alone.seconds


def test_only_settings_that_differ_from_the_configuration_are_proposed(configuration: dict[str, Any]) -> None:
    found = comparison(configuration, with_gpus(8.0), "trainer.tensor_parallel=2")
    split = next(one for one in found.fitting if one.layout.options["tensor_parallel"] == 2)
    overrides = found.overrides(split).split()
    assert {"placement.actor.ranks=4", "trainer.sequence_parallel=true"} <= set(overrides)
    assert not any(each.startswith("trainer.tensor_parallel=") for each in overrides)
    assert "trainer.context_parallel" not in found.overrides(found.fitting[0])


def test_ranks_on_cpus_share_the_memory_of_the_host(configuration: dict[str, Any]) -> None:
    machine = Machine(0, False, 64 * GIB, 0, 1e10, 1e10, 1e9)
    found = comparison(configuration, machine)
    assert all(one.available == 64 * GIB and one.needed > 5 * LIBRARIES for one in found.fitting)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer=torch"], r"trainer.name: got torch; this trainer names no layouts; choose megatron"),
        (["trainer.python=/usr/bin/python3"], r"trainer.python: .*; .* add trainer.python= to the command"),
    ],
)
def test_a_trainer_without_layouts_is_refused(configuration: dict[str, Any], overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        comparison(configuration, with_gpus(8.0), *overrides)


def test_a_machine_without_gpus_needs_their_number_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "device_memory", dict)
    with pytest.raises(ConfigError, match=r"--gpu-memory: got nothing; .* give the GiB"):
        Machine.of(8, 0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match=r"--gpus: got nothing; .* give the number"):
        Machine.of(0, 80.0, 0.0, 0.0)
    assert Machine.of(8, 80.0, 100.0, 50.0) == Machine(8, True, 0, 80 * GIB, 1e14, layouts.GPU_MEMORY, 5e10)
    monkeypatch.setattr(layouts, "device_memory", lambda: {"gpu:0": 40 * GIB, "gpu:1": 40 * GIB})
    assert Machine.of(0, 0.0, 100.0, 0.0).ranks == 2


def test_the_time_of_a_step_is_work_plus_waiting_plus_messages() -> None:
    machine = Machine(1, True, 0, GIB, 10.0, 100.0, 1000.0)
    estimate = Estimate({}, {"train": 20.0}, (), {"train": 100.0}, {"train": 500.0}, {"train": 0.5})
    assert machine.seconds(estimate, passes=2) == 2 * ((2.0 + 1.0) / 0.5 + 0.5)


def test_the_command_prints_the_best_layout_as_overrides(configuration: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    model, data = configuration["model"]["path"], configuration["data"]["train"]
    file.write_text(
        f'model = {{path = "{model}", dtype = "bfloat16"}}\ndata.train = "{data}"\nalgorithm = "grpo"\n'
        'engine = "transformers"\ntrainer = "megatron"\nrewards = ["exact"]\nplacement = "hybrid"\n'
        "rollout = {groups_per_step = 8, group_size = 2, max_new_tokens = 1000}\neval.every = 0\n"
    )
    options = ["--layouts", "--gpus", "4", "--gpu-memory"]
    shown = CliRunner().invoke(app, ["plan", str(file), *options, "1.5"])
    assert shown.exit_code == 0, shown.output
    assert "first of them: placement.actor.ranks=4 " in shown.output
    assert "trainer.tensor_parallel 4: it must divide the 2 key-value heads of the model (1 layout)" in shown.output
    output = CliRunner().invoke(app, ["plan", str(file), *options, "0.01", "--anyway", "--json"]).output
    layouts = json.loads(output)["stages"][0]["layouts"]
    assert {one["available"] for one in layouts if one["needed"]} == {int(0.01 * GIB)}
    assert all(one["refused"] for one in layouts)
