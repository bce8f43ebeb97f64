# SPDX-License-Identifier: Apache-2.0
"""Who shares whose devices, in every mode and where a role says otherwise."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

import relax_core
from relax_core.api.engine import EngineSpec
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Plan
from relax_core.config.run_config import RunConfig
from relax_core.config.tables import SHARES
from relax_core.control.placement import placement_notes
from relax_core.engines import factories
from relax_core.registry.catalogue import Catalogue
from tests.unit.control import conftest

ROOT = Path(relax_core.__file__).parent
ASKS = ("algorithm.kl_coef=0.1", "batch.updates_per_step=2", "algorithm.correction=truncate")
"""For the reference, and log-probs of the starting policy."""


def configured(catalogue: Catalogue, *overrides: str) -> RunConfig:
    return conftest.configured(catalogue, *ASKS, *overrides)


def planned(catalogue: Catalogue, *overrides: str, on_gpus: bool = False) -> Plan:
    return conftest.planned(catalogue, *ASKS, *overrides, on_gpus=on_gpus)


def neighbours(made: Plan) -> dict[str, set[str]]:
    return {role: set(made.neighbours(role)) for role in made.groups}


def test_a_mode_sets_which_roles_share_devices(catalogue: Catalogue) -> None:
    colocate, hybrid, apart = (neighbours(planned(catalogue, f"placement={mode}")) for mode in SHARES)
    assert colocate == {
        "actor": {"rollout", "reference"}, "rollout": {"actor", "reference"}, "reference": {"actor", "rollout"},
    }  # fmt: skip
    assert hybrid == {"actor": {"reference"}, "rollout": set(), "reference": {"actor"}}
    assert apart == {"actor": set(), "rollout": set(), "reference": set(), "actor-fwd": set()}


@pytest.mark.parametrize(
    ("overrides", "role", "others"),
    [
        (("placement=hybrid", "placement.reference.share=own"), "reference", set()),
        (("placement=async", "placement.reference.share=rollout"), "reference", {"rollout"}),
        (("placement=colocate", "placement.rollout.share=own"), "rollout", set()),
        (("placement=colocate", "placement.reference.share=rollout"), "reference", {"actor", "rollout"}),
        (("placement=hybrid", "placement.actor_fwd.share=own"), "actor-fwd", set()),
    ],
)
def test_a_role_can_override_the_modes_sharing(
    catalogue: Catalogue, overrides: tuple[str, ...], role: str, others: set[str]
) -> None:
    made = planned(catalogue, *(override.replace("placement=", "placement.mode=") for override in overrides))
    assert neighbours(made)[role] == others


def test_devices_are_named_by_processes_and_gpus(catalogue: Catalogue) -> None:
    sized = ("placement.mode=colocate", "placement.rollout.engines=2", "placement.rollout.gpus_per_engine=2",
             "placement.actor.ranks=8", "placement.reference.share=own")  # fmt: skip
    groups = planned(catalogue, *sized, on_gpus=True).groups
    assert groups["actor"].devices == {f"gpu:{number}" for number in range(8)}
    assert groups["rollout"].devices == {f"gpu:{number}" for number in range(4)}
    assert groups["reference"].devices == {"gpu:8"}
    on_cpu = planned(catalogue, "placement.mode=hybrid").groups
    assert (on_cpu["actor"].devices, on_cpu["rollout"].devices) == ({"cpu:0"}, {"cpu:1"})


def test_each_process_has_its_devices_and_its_share_of_a_gpu(catalogue: Catalogue) -> None:
    sized = ("placement.mode=colocate", "placement.rollout.engines=2", "placement.actor.ranks=2")
    made = planned(catalogue, *sized, on_gpus=True)
    assert [made.groups["actor"].process_devices(rank) for rank in range(2)] == [("gpu:0",), ("gpu:1",)]
    assert made.groups["rollout"].process_devices(1) == ("gpu:1",) and made.groups["reference"].process_devices(0) == (
        "gpu:0",
    )
    assert made.num_gpus(("gpu:1",)) == 1 / 2
    assert made.num_gpus(("gpu:0",)) == pytest.approx(1 / 3)
    halves = planned(catalogue, "placement.mode=hybrid", "placement.rollout.engines=3",
                     "placement.rollout.gpus_per_engine=0.5", on_gpus=True)  # fmt: skip
    seats = [halves.groups["rollout"].process_devices(number) for number in range(3)]
    assert seats == [("gpu:1",), ("gpu:2",), ("gpu:1",)]
    assert [halves.num_gpus(seat) for seat in seats] == [1 / 2, 1, 1 / 2]
    on_cpu = planned(catalogue, "placement=colocate")
    assert (on_cpu.groups["rollout"].process_devices(0), on_cpu.num_gpus(("cpu:0",))) == (("cpu:0",), 0)


def test_too_many_gpus_are_reported(catalogue: Catalogue) -> None:
    config = configured(catalogue, "placement=hybrid")
    groups = planned(catalogue, "placement=hybrid", on_gpus=True).groups
    notes = {shown: [*placement_notes(config, {}, groups, shown)] for shown in (0, 1, 2)}
    assert notes[2] == notes[0]
    (said,) = [note for note in notes[1] if note not in notes[0]]
    assert said.startswith("2 GPUs are planned; on this machine 1 would be shared without turns")


def test_a_cpu_frees_only_what_need_not_be_kept(catalogue: Catalogue) -> None:
    offloads = {
        on: {n: set(g.offloads) for n, g in planned(catalogue, on_gpus=on).groups.items()} for on in (True, False)
    }
    assert offloads[False] == {"actor": {"gradients"}, "rollout": {"kv"}, "reference": set()}
    assert offloads[True] == {
        "actor": {"weights", "optimizer", "gradients"}, "rollout": {"weights", "kv"}, "reference": {"weights"},
    }  # fmt: skip


def test_the_plan_names_shared_devices_and_offloaded_parts(catalogue: Catalogue) -> None:
    notes = planned(catalogue, "placement=colocate").notes
    assert "actor, reference and rollout take turns on cpu:0" in notes
    assert "rollout offloads kv while a neighbour has the devices" in notes
    assert not any("turns" in note for note in planned(catalogue, "placement=async").notes)


def test_an_actor_with_shared_devices_does_not_stream(catalogue: Catalogue) -> None:
    one = "batch.updates_per_step=1"
    assert not planned(catalogue, "placement=colocate", one).streams
    assert not planned(catalogue, "placement=hybrid", one).streams
    assert planned(catalogue, "placement=async", one).streams


def test_live_weights_need_both_sides_awake_on_gpus_of_their_own(catalogue: Catalogue) -> None:
    live = ("placement=colocate", "weights=collective")
    with pytest.raises(ConfigError, match="weights.name"):
        planned(catalogue, *live, on_gpus=True)
    assert planned(catalogue, *live, on_gpus=False).shared


def test_only_the_configuration_knows_modes_by_name() -> None:
    """Everything else asks who shares with whom."""
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in SHARES
    }
    assert {path.partition("/")[0] for path in knowing} == {"config"}


def test_an_engine_that_gives_no_memory_back_cannot_take_turns_on_a_gpu(catalogue: Catalogue) -> None:
    with pytest.raises(
        ConfigError, match=r'engine\.name: .*sglang.* shared with .*actor.* use transformers or .*"hybrid"'
    ):
        planned(catalogue, "engine=sglang", "placement=colocate", on_gpus=True)
    for fine in (("placement=hybrid",), ("placement.mode=colocate", "placement.rollout.share=own")):
        assert not neighbours(planned(catalogue, "engine=sglang", *fine, on_gpus=True))["rollout"]
    assert planned(catalogue, "engine=sglang", "placement=colocate").groups["rollout"].offloads == ()
    assert planned(catalogue, "engine=vllm", "placement=colocate").groups["rollout"].offloads == ()
    parts = planned(catalogue, "engine=vllm", "placement=colocate", on_gpus=True).groups["rollout"].offloads
    assert parts == ("kv", "weights")


def test_an_engine_has_the_gpus_that_its_options_spread_it_over(catalogue: Catalogue) -> None:
    spread = ("engine=vllm", "engine.tensor_parallel=2", "engine.pipeline_parallel=2", "placement.mode=hybrid",
              "placement.rollout.engines=2")  # fmt: skip
    made = planned(catalogue, *spread, on_gpus=True)
    assert made.groups["rollout"].devices == {f"gpu:{number}" for number in range(1, 9)}
    assert planned(catalogue, *spread, "placement.rollout.gpus_per_engine=4", on_gpus=True).groups == made.groups
    assert not any("gpu" in device for device in planned(catalogue, *spread).groups["rollout"].devices)


@pytest.mark.parametrize(
    ("overrides", "on_gpus", "message"),
    [
        (("engine=vllm", "engine.tensor_parallel=2", "placement.rollout.gpus_per_engine=0"), True, "uses 2: set 2"),
        (("engine=vllm", "engine.tensor_parallel=2", "placement.rollout.gpus_per_engine=1"), True, "uses 2: set 2"),
        (("engine=vllm", "placement.rollout.gpus_per_engine=2"), True, "uses 1: set 1"),
        (("engine=sglang", "placement.rollout.gpus_per_engine=2"), True, "engine sglang, as configured, uses 1"),
        (("engine=vllm", "engine.expert_parallel=true"), True, "set tensor_parallel to 2 or more"),
        (("engine=vllm", "engine.engine_args.data_parallel_size=2"), True, "placement.rollout"),
        (("engine=sglang", "engine.server_args.tp_size=2"), True, "works on one GPU"),
        (("engine=sglang", "engine.server_args.dtype=half"), True, r"got dtype \(set model\.dtype\)"),
        (
            ("engine=sglang", "engine.server_args.context_length=9"),
            True,
            r"context_length \(remove it\), which this engine",
        ),
    ],
)
def test_devices_that_do_not_divide_are_refused(
    catalogue: Catalogue, overrides: tuple[str, ...], on_gpus: bool, message: str
) -> None:
    overrides = tuple(override.replace("placement=", "placement.mode=") for override in overrides)
    with pytest.raises(ConfigError, match=message):
        planned(catalogue, "placement.mode=hybrid", *overrides, on_gpus=on_gpus)


@pytest.mark.parametrize(
    ("overrides", "on_gpus", "message"),
    [
        (
            ("placement=colocate",),
            False,
            "placement: got engines that take turns on their devices with actor, reference",
        ),
        (("placement=async", "placement.reference.share=rollout"), False, "placement: got engines that take turns"),
        (("placement=hybrid",), True, "placement: got engines on gpu:"),
        (("placement=hybrid", "deterministic=true"), False, "deterministic: got true"),
        (("placement=hybrid", "run.runner=inline"), False, "run.runner: got 'inline'"),
    ],
)
def test_a_scaling_policy_needs_engines_whose_number_can_change(
    catalogue: Catalogue, overrides: tuple[str, ...], on_gpus: bool, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(catalogue, "autoscale=balance", *overrides, on_gpus=on_gpus)
    assert str(caught.value).startswith(message) and "remove [autoscale]" in str(caught.value)
    planned(catalogue, "autoscale=balance", "placement=hybrid")


def test_ray_gives_engines_that_join_as_many_gpus_as_the_first_engines_have(catalogue: Catalogue) -> None:
    settings = ("autoscale=balance", "placement=hybrid", "run.runner=ray", "placement.rollout.engines=2")
    config, made = configured(catalogue, *settings), planned(catalogue, *settings, on_gpus=True)
    context = SimpleNamespace(config=config, plan=made, build=catalogue.build, track=lambda *_: None, workers=None)
    group = made.groups["rollout"]
    make_slot = factories._slot_maker(context, group, config.engine, EngineSpec({}, 64), 20.0)  # type: ignore[arg-type]
    first, last, joining = (make_slot(f"engine-{number}", number, "")._worker_spec for number in range(3))
    assert not first.elastic and not last.elastic and joining.elastic
    assert first.devices + last.devices == tuple(sorted(group.devices)) and joining.devices == ()
    assert first.num_gpus == last.num_gpus == joining.num_gpus == 1.0
