# SPDX-License-Identifier: Apache-2.0
"""Components, the parts that plugins offer, and the table of component kinds.

A `Component` names its class by strings only, so listing plugins imports none of them. `Configurable` is the base of
every component class. `relax plugins`, `relax new`, the schema and the docs read `KINDS`; a new kind is one new entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast, get_args, get_origin

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from relax_core.api.options import Options

    OptionsT = TypeVarWithDefault("OptionsT", default=Any)
else:
    OptionsT = TypeVar("OptionsT")  # Python 3.11 has no defaults of type variables
ContractT = TypeVar("ContractT", bound="Configurable[Any]")


@dataclass(frozen=True, slots=True)
class Component:
    """A plugin's entry for one component: kind-specific code that a configuration can choose by name."""

    name: str
    """Name in the user's TOML: kebab-case, unique per kind."""
    target: str
    """The class as `package.module:Class`; imported only when a configuration chooses the component."""
    help: str
    """One-line description that `relax plugins list` prints."""
    experimental: bool = False


@dataclass(frozen=True, slots=True)
class Table(Component):
    """A plugin's entry for a configuration table that the plugin owns; the target is a subclass of `TableOptions`."""


@dataclass(frozen=True, slots=True)
class Check(Component):
    """A plugin's entry for a check of runs; the target is a pure function that takes facts and yields `CheckFinding`s."""

    stage: Literal["preflight", "first-step"] = field(kw_only=True)
    """`preflight`: takes `PreflightFacts`, before the run starts. `first-step`: takes `FirstStepFacts`, after step 1."""
    timeout_s: float = field(default=30.0, kw_only=True)
    """Seconds that the check may take."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A chosen component: its name, and its options as plain data, from which any process can build the component."""

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Chosen, ...] = ()
    """The parts of a combined component, such as the algorithms of a run with several algorithms; else empty."""


class Configurable(Generic[OptionsT]):
    """The base of every component class; `options` holds the typed options of an instance."""

    kind: ClassVar[str] = ""
    preload: ClassVar[tuple[str, ...]] = ()
    """Slow modules that a worker process imports before it builds the component; importing them must start nothing."""

    def __init__(self, options: OptionsT | None = None) -> None:
        self.options: OptionsT = options if options is not None else cast(OptionsT, self.options_model()())

    def check_start(self, here: bool = True) -> None:
        """Raise ImportError or ConfigError if an engine or trainer can't start; called in the component's interpreter.

        Imports the packages that `start` needs, and loads no model. `here`: the component will start on this machine, so
        its devices are checked too.
        """
        for module in self.preload:
            import_module(module)

    @classmethod
    def options_model(cls) -> type[Options]:
        """Return the options class given as the generic parameter, or `Options`, which has no fields."""
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
    """A kind of component, such as algorithm or engine."""

    name: str
    hook: str
    base: str
    """Base class as `module:Class`, imported only when needed; empty: the components are functions."""
    table: str
    """Configuration table that chooses the component; empty: no table."""
    many: bool = False
    """True: `table` is an array of tables, which chooses several components."""
    suite: str = ""
    """Conformance suite as `module:Class`."""
    entry: type[Component] = Component
    """Class of the entries that the hook returns."""


def _kind(name: str, hook: str, base: str, table: str = "", *, many: bool = False) -> Kind:
    noun = base.split(":")[1].removesuffix("Component")
    suite = f"relax_core.testing.{name.replace('-', '_')}:{noun}Suite"
    return Kind(name, hook, f"relax_core.api.{base}", table, many, suite)


_TABLE = Kind(
    "table", "relax_tables", "relax_core.api.options:TableOptions", "", suite="relax_core.testing.table:TableSuite",
    entry=Table,
)  # fmt: skip
_CHECK = Kind("check", "relax_checks", "", "", suite="relax_core.testing.check:CheckSuite", entry=Check)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _kind("algorithm", "relax_algorithms", "algorithm:Algorithm", "algorithm"),
        _kind("reward", "relax_rewards", "reward:Reward", "rewards", many=True),
        _kind("environment", "relax_environments", "environment:Environment", "environment"),
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
        _kind("scaling-policy", "relax_scaling_policies", "scaling:ScalingPolicy", "autoscale"),
        _kind("sandbox", "relax_sandboxes", "sandbox:Sandbox", "sandbox"),
        _kind("role", "relax_roles", "role:Role"),
        _TABLE,
        _CHECK,
    )
}
BY_HOOK: dict[str, Kind] = {kind.hook: kind for kind in KINDS.values()}
BY_TABLE: dict[str, Kind] = {kind.table: kind for kind in KINDS.values() if kind.table}
BY_TABLE["environments"] = replace(KINDS["environment"], table="environments", many=True)
"""`[[environments]]` adds environments for the tasks that name them."""
CORE_KEYS = frozenset({
    "steps", "epochs", "seed", "max_staleness", "deterministic", "plugins", "stages", "model", "data", "teachers",
    "engines", "rollout", "optimizer", "critic", "reference", "batch", "eval", "placement", "checkpoint", "export",
    "profile", "recovery", "guards", "run",
})  # fmt: skip
"""Keys and tables of the core at the top level of a configuration; no plugin may offer a table of this name."""
