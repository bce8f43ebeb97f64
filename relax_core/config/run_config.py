# SPDX-License-Identifier: Apache-2.0
"""`RunConfig`: one run's whole configuration, resolved: typed core tables and chosen components.

`dump` gives plain data and `parse` takes it back exactly: that is how roles in other processes get it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

from pydantic import Field, NonNegativeInt, PositiveInt

from relax_core.api.component import BY_TABLE
from relax_core.api.options import Options
from relax_core.api.role import Context
from relax_core.api.trainer import Chosen
from relax_core.config.annotation import models_in
from relax_core.config.auxiliary_models import EngineTable, TeacherTable
from relax_core.config.choice import BackendChoice, Choice, EnvironmentChoice, MediaChoice, RewardChoice, WeightChoice
from relax_core.config.operation import CheckpointTable, NotifyTable, PlacementTable, RunTable
from relax_core.config.training import (
    BatchTable,
    CriticTable,
    DataTable,
    EvalTable,
    ModelTable,
    OptimizerTable,
    RolloutTable,
)

if TYPE_CHECKING:
    from relax_core.registry.catalogue import Catalogue

DEFAULT_STALENESS = {"colocate": 0, "hybrid": 1, "async": 1}


class Core(Options):
    """Every key that belongs to the core."""

    steps: PositiveInt = 200
    """Training steps; one consumes `rollout.prompts_per_step` groups."""
    seed: int = 0
    """Of data order, sampling and initialisation."""
    max_staleness: NonNegativeInt | Literal["unbounded"] = 0
    """Most versions between sampling a token and training it; 0: on-policy. Default: 0 with placement `colocate` or
    when deterministic, else 1."""
    deterministic: bool = False
    """The same weights bit for bit in every run of this configuration, at a cost in speed."""
    plugins: tuple[Path, ...] = ()
    """Python files to use as plugins, besides what is installed."""
    model: ModelTable
    """The policy."""
    data: DataTable
    """The tasks."""
    teachers: tuple[TeacherTable, ...] = ()
    """Models to learn from."""
    engines: tuple[EngineTable, ...] = ()
    """Pools of engines beside the policy's."""
    rollout: RolloutTable = RolloutTable()
    """Generation."""
    optimizer: OptimizerTable = OptimizerTable()
    """The optimizer."""
    critic: CriticTable = CriticTable()
    """The critic, where the algorithm trains one."""
    batch: BatchTable = BatchTable()
    """Updates of a step."""
    eval: EvalTable = EvalTable()
    """Evaluation."""
    placement: PlacementTable = PlacementTable()
    """Who runs where."""
    checkpoint: CheckpointTable = CheckpointTable()
    """Checkpoints."""
    run: RunTable = RunTable()
    """The run itself."""
    notify: NotifyTable = NotifyTable()
    """Notifications."""


class RunConfig(Core):
    """The core's tables and, by table, the chosen components."""

    components: Mapping[str, tuple[Choice, ...]] = Field(default={}, repr=False)
    """Chosen components of every table; tables of one component hold one or, where nothing is chosen, none."""

    @classmethod
    def parse(cls, data: Mapping[str, Any], catalogue: Catalogue) -> Self:
        """From plain data as `dump` gives it; every option is validated by its component's model."""
        from relax_core.config.compose import resolve
        from relax_core.config.layers import read_layer

        return cast(Self, resolve(read_layer(data, Path.cwd()), catalogue))

    def dump(self) -> dict[str, Any]:
        """Plain data, every default written out; secrets stay references, what is None is left out."""
        data = self.model_dump(mode="json", exclude={"components"}, exclude_none=True)
        for table, choices in self.components.items():
            dumped = [choice.dump() for choice in choices]
            if BY_TABLE[table].many:
                data[table] = dumped
            elif dumped:
                data[table] = dumped[0]
        return data

    @property
    def staleness(self) -> int | None:
        """`max_staleness` as a number; None is unbounded."""
        return None if self.max_staleness == "unbounded" else self.max_staleness

    @property
    def engine_dtype(self) -> str:
        """The engines' number format, in which weights are published."""
        return self.rollout.dtype or self.model.dtype

    @property
    def algorithm(self) -> Choice:
        return self.components["algorithm"][0]

    @property
    def engine(self) -> BackendChoice:
        return cast(BackendChoice, self.components["engine"][0])

    def pool(self, name: str) -> EngineTable | None:
        """The pool of this name; None where there is none."""
        return next((pool for pool in self.engines if pool.name == name), None)

    def backend_of(self, pool: EngineTable) -> BackendChoice:
        """What a pool's engines are: its own, or as the policy's."""
        if not pool.engine:
            return self.engine
        options = dict(pool.engine)
        name, python = options.pop("name"), options.pop("python", "")
        return BackendChoice(chosen=Chosen("engine", name, options), python=python)

    @property
    def trainer(self) -> BackendChoice:
        return cast(BackendChoice, self.components["trainer"][0])

    @property
    def environment(self) -> Choice:
        return self.components["environment"][0]

    @property
    def environments(self) -> tuple[EnvironmentChoice, ...]:
        """Further ones, for tasks that name them."""
        return cast(tuple[EnvironmentChoice, ...], self.components.get("environments", ()))

    @property
    def algorithms(self) -> tuple[Chosen, ...]:
        """The run's, and what environments have of their own; each once."""
        own = [environment.learner for environment in self.environments]
        found = [self.algorithm.chosen]
        found += [one for at, one in enumerate(own) if one and one not in (*found, *own[:at])]
        return tuple(found)

    @property
    def learner(self) -> Chosen:
        """What roles build: the algorithm, or all of them as one."""
        several = self.algorithms
        return several[0] if len(several) == 1 else Chosen("algorithm", several[0].name, parts=several)

    def algorithm_of(self, environment: str) -> int:
        """Place in `algorithms` of what learns from tasks that name this environment."""
        own = next((one.learner for one in self.environments if one.name == environment), None)
        return 0 if own is None else self.algorithms.index(own)

    @property
    def family(self) -> Choice:
        return self.components["family"][0]

    @property
    def source(self) -> Choice:
        return self.components["source"][0]

    @property
    def sampler(self) -> Choice:
        return self.components["sampler"][0]

    @property
    def bus(self) -> Choice:
        return self.components["bus"][0]

    @property
    def weights(self) -> WeightChoice:
        return cast(WeightChoice, self.components["weights"][0])

    @property
    def rewards(self) -> tuple[RewardChoice, ...]:
        return cast(tuple[RewardChoice, ...], self.components["rewards"])

    @property
    def media(self) -> tuple[MediaChoice, ...]:
        return cast(tuple[MediaChoice, ...], self.components["media"])

    @property
    def filters(self) -> tuple[Choice, ...]:
        return self.components["filters"]

    @property
    def sinks(self) -> tuple[Choice, ...]:
        return self.components["sinks"]


RunContext: TypeAlias = Context[RunConfig]
"""The context of the core's own roles: they read the configuration by its types."""


def core_tables() -> dict[str, type[Options]]:
    """The model of each core table, in order."""
    fields = Core.model_fields.items()
    return {
        name: cast(type[Options], models_in(field.annotation)[0])
        for name, field in fields
        if models_in(field.annotation)
    }


def top_level_keys() -> tuple[str, ...]:
    """Keys that stand in no table."""
    return tuple(name for name in Core.model_fields if name not in core_tables())


def table_keys() -> dict[str, list[str]]:
    """Every table with the keys that the core knows in it."""
    from relax_core.config.choice import core_keys

    known = {name: list(model.model_fields) for name, model in core_tables().items()}
    return {**known, **{table: ["name", *core_keys(table)] for table in BY_TABLE}}
