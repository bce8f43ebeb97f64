# SPDX-License-Identifier: Apache-2.0
"""The one table of kinds. `list`, `check`, `new`, the schema and the docs are made from it; a new kind is one edit."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Kind:
    """What can vary."""

    name: str
    hook: str
    base: str
    """Base class, `module:Class`, imported only when needed."""
    table: str
    """Configuration table; empty where none selects it."""
    many: bool = False
    """An array of tables: several at once."""
    suite: str = ""
    """Conformance suite, `module:Class`."""
    template: str = ""
    """Cookiecutter template, where `relax new` has one."""


def _kind(name: str, hook: str, base: str, table: str = "", *, many: bool = False, template: str = "") -> Kind:
    noun = base.split(":")[1].removesuffix("Component")
    suite = f"relax_core.testing.{name.replace('-', '_')}:{noun}Suite"
    return Kind(name, hook, f"relax_core.api.{base}", table, many, suite, template)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _kind("algorithm", "relax_algorithms", "algorithm:Algorithm", "algorithm", template="algorithm"),
        _kind("reward", "relax_rewards", "reward:Reward", "rewards", many=True, template="reward"),
        _kind("environment", "relax_environments", "environment:Environment", "environment", template="environment"),
        _kind("modality-processor", "relax_modality_processors", "modality:ModalityProcessor", "media", many=True),
        _kind("engine", "relax_inference_backends", "engine:Engine", "engine"),
        _kind("trainer", "relax_training_backends", "trainer:Trainer", "trainer"),
        _kind("model-family", "relax_model_families", "family:ModelFamily", "family"),
        _kind("task-source", "relax_task_sources", "source:TaskSource", "source"),
        _kind("sampler", "relax_samplers", "source:Sampler", "sampler"),
        _kind("filter", "relax_filters", "source:Filter", "filters", many=True),
        _kind("sink", "relax_sinks", "sink:Sink", "sinks", many=True),
        _kind("bus", "relax_buses", "bus:BusComponent", "bus"),
        _kind("weight-transport", "relax_weight_transports", "weights:WeightTransport", "weights"),
        _kind("scaling-policy", "relax_scaling_policies", "scaling:ScalingPolicy", "scaling"),
        _kind("role", "relax_roles", "role:Role"),
    )
}
BY_HOOK: dict[str, Kind] = {kind.hook: kind for kind in KINDS.values()}
BY_TABLE: dict[str, Kind] = {kind.table: kind for kind in KINDS.values() if kind.table}
BY_TABLE["environments"] = replace(KINDS["environment"], table="environments", many=True)
"""A run has one environment, and further ones for tasks that name them."""
