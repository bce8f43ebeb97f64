# SPDX-License-Identifier: Apache-2.0
"""Components, the things that a plugin offers, and the one table of their kinds.

`Component` names a target by strings only, so that listing a hundred plugins imports none of them; `Configurable` is the
base of every target class. `list`, `check`, `new`, the schema and the docs are made from `KINDS`: a new kind is one edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, cast, get_args, get_origin

from typing_extensions import TypeVar

if TYPE_CHECKING:
    from relax_core.api.options import Options


OptionsT = TypeVar("OptionsT", default=Any)
ContractT = TypeVar("ContractT", bound="Configurable[Any]")


@dataclass(frozen=True, slots=True)
class Component:
    """One named thing of one kind in a plugin."""

    name: str
    """Kebab-case and unique per kind; users write it in their TOML."""
    target: str
    """Where the class is: `package.module:Class`. Imported only when chosen."""
    help: str
    """One line for `relax plugins list`."""
    experimental: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """A component by name with its options as plain data, so that a worker can build it."""

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Chosen, ...] = ()
    """What it is made of, where it is several of its kind that work as one: the algorithms of a run that has more."""


class Configurable(Generic[OptionsT]):
    """Base of every component class; keeps the typed options it was built from."""

    kind: ClassVar[str] = ""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that a worker process of it needs and that take seconds to import; importing them starts nothing."""

    def __init__(self, options: OptionsT | None = None) -> None:
        self.options: OptionsT = options if options is not None else cast(OptionsT, self.options_model()())

    @classmethod
    def options_model(cls) -> type[Options]:
        """The pydantic model named as generic parameter; `Options` (no options) where none is named."""
        return _named_model(cls) or _empty_model()


def _named_model(cls: type) -> type[Options] | None:
    for base in cls.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            for argument in get_args(generic):
                if get_origin(generic) is not Generic and hasattr(argument, "model_fields"):  # a pydantic model
                    return argument  # type: ignore[no-any-return]
    return None


def _empty_model() -> type[Options]:
    from relax_core.api.options import Options

    return Options


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of component: one of the things that a plugin can vary."""

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
        _kind("sink", "relax_sinks", "events:Sink", "sinks", many=True),
        _kind("bus", "relax_buses", "bus:BusComponent", "bus"),
        _kind("weight-transport", "relax_weight_transports", "weights:WeightTransport", "weights"),
        _kind("scaling-policy", "relax_scaling_policies", "engine:ScalingPolicy", "scaling"),
        _kind("sandbox", "relax_sandboxes", "sandbox:Sandbox", "sandbox"),
        _kind("role", "relax_roles", "role:Role"),
    )
}
BY_HOOK: dict[str, Kind] = {kind.hook: kind for kind in KINDS.values()}
BY_TABLE: dict[str, Kind] = {kind.table: kind for kind in KINDS.values() if kind.table}
BY_TABLE["environments"] = replace(KINDS["environment"], table="environments", many=True)
"""A run has one environment, and further ones for tasks that name them."""
