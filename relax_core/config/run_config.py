# SPDX-License-Identifier: Apache-2.0
"""`RunConfig`, the resolved configuration of one run: typed core tables and chosen components; and its TOML form.

Processes of roles get the plain data of `dump`; `compose.parse_config` turns the data into the same configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.component import BY_TABLE, Chosen
from relax_core.api.options import Options, TableOptions
from relax_core.api.role import Context
from relax_core.api.scaling_limits import ScalingLimits
from relax_core.config.annotation import PathText, models_in
from relax_core.config.guard_tables import GuardsTable
from relax_core.config.tables import (
    BatchTable,
    CheckpointTable,
    CriticTable,
    DataTable,
    EngineTable,
    EvalTable,
    ExportTable,
    ModelTable,
    OptimizerTable,
    PlacementTable,
    ProfileTable,
    RecoveryTable,
    ReferenceTable,
    RolloutTable,
    RunTable,
    TeacherTable,
)

TableT = TypeVar("TableT", bound=TableOptions)


class Choice(Options):
    """The component that a table of the configuration chooses."""

    chosen: Chosen
    """Kind, name and options of the component as plain data."""

    @property
    def name(self) -> str:
        return self.chosen.name

    def dump(self) -> dict[str, object]:
        """Return the component's table as a user writes the table: name, core keys, options."""
        keys = self.model_dump(mode="json", exclude={"chosen"}, exclude_none=True)
        return {"name": self.chosen.name, **keys, **self.chosen.options}


LABEL = r"^$|^[A-Za-z0-9][A-Za-z0-9._-]*$"


class BackendKeys(Options):
    """Core keys of an engine or a trainer."""

    python: PathText = ""
    """Python interpreter of the engine's or trainer's processes, such as `venvs/sglang/bin/python`; empty: the
    interpreter of this command."""


class RewardKeys(Options):
    """Core keys of a reward."""

    label: str = Field("", pattern=LABEL)
    """Name of the reward in metrics, `reward/<label>`; empty: the component's name. Needed to use a component twice."""
    weight: float = 1.0
    """Factor of this reward in the sum of rewards."""
    timeout_s: PositiveFloat = 10.0
    """Seconds to judge a sample; after that, the process is killed and the sample's outcome is `reward_timeout`."""
    memory_mb: NonNegativeInt = 0
    """Memory limit of the reward's process, in MB; 0: no limit."""
    inherit_env: tuple[str, ...] = ()
    """Names of environment variables that the reward's process inherits in addition to a short list without
    credentials, such as `OPENAI_API_KEY`. The process always gets the variables of `[run] env`."""
    writable: tuple[Path, ...] = ()
    """Existing folders that the reward's process may change, such as the cache of a library. Everything else
    is read-only except a scratch folder and the temporary folders. The run directory stays closed and the installation of
    Python read-only, also in a folder of this list."""
    only: str = Field("", pattern=r"^$|^otherwise$|^[^=]+=")
    """Limits the reward to tasks in which a column has this value, such as `source=algebra`; dots address values inside
    a column that is a table. `eval_set=NAME`: the tasks of this evaluation set. `otherwise`: tasks that no other reward
    selects by its `only`. Empty: all tasks."""


class MediaKeys(Options):
    """Core keys of a modality processor."""

    timeout_s: PositiveFloat = 30.0
    """Seconds to read and process a medium; after that, the process is killed and its samples get `media_error`."""
    memory_mb: NonNegativeInt = 4096
    """Memory limit of the processor's process, in MB; 0: no limit."""
    writable: tuple[Path, ...] = ()
    """Existing folders that the processor's process may change, such as the cache of a library. Everything else
    is read-only except a scratch folder and the temporary folders. The run directory stays closed and the installation of
    Python read-only, also in a folder of this list."""
    max_mb: PositiveInt = 256
    """Size limit of a file or of the response to a URL, in MB; larger media are refused."""
    preview_kb: NonNegativeInt = 512
    """Size limit, in KB, of a copy of a medium for the samples on the report page; 0: no copies."""


class WeightKeys(Options):
    """Core keys of the weight transport."""

    payload: Literal["full", "delta"] = "full"
    """Content of a publish: `full` sends all tensors, `delta` only the bytes that changed. With either payload, LoRA
    adapters (`model.lora`) are published alone if engine and transport support that."""
    full_every: PositiveInt = 16
    """With `delta`: publish one of this many versions in full, so that a new engine has few deltas to load."""
    proof: Literal["auto", "wire", "resident", "behaviour"] = "auto"
    """Proof that an engine must give before it serves new weights. `wire`: the received bytes are correct. `resident`:
    the bytes in the engine's memory are correct. `behaviour`: the engine also gives the trainer's log-probs for a short
    sequence. `auto`: `resident` if the engine can check its memory, else `wire`."""
    tolerance: PositiveFloat = 0.05
    """With `behaviour`: largest difference between a log-prob of the engine and of the trainer."""
    timeout_s: PositiveFloat = 300.0
    """Seconds for one engine to load a publish; a slower engine is replaced without stopping the rest of the pool."""


class WeightChoice(WeightKeys, Choice):
    """The chosen transport of weights, with its core keys."""


class SandboxKeys(Options):
    """Core keys of a sandbox."""

    programs: NonNegativeInt = 0
    """Most programs that run at once, over all samples; 0: one per CPU core. The time that a program waits to start
    does not count as run time."""
    boxes: PositiveInt = 256
    """Most samples with an open box at once."""


class SandboxChoice(SandboxKeys, Choice):
    """The chosen sandbox, with its core keys."""


class AutoscaleChoice(ScalingLimits, Choice):
    """The chosen scaling policy, with the limits on its proposals."""


class BackendChoice(BackendKeys, Choice):
    """The chosen engine or trainer, with its core keys."""


class RewardChoice(RewardKeys, Choice):
    """A chosen reward, with its core keys."""

    @property
    def known_as(self) -> str:
        """The reward's unique name in the run."""
        return self.label or self.name


class MediaChoice(MediaKeys, Choice):
    """A chosen modality processor, with its core keys."""


class EnvironmentKeys(Options):
    """Core keys of an environment."""

    label: str = Field("", pattern=LABEL)
    """Name by which tasks select the environment; empty: the component's name. Needed to use a component twice."""
    isolation: Literal["auto", "shared", "sample"] = "auto"
    """`shared`: killable processes, each of which plays many samples. `sample`: killable processes that play one sample
    at a time, isolated from the rest. `auto`: the rollout's own process if the class declares that it cannot block or
    crash (`in_process`), else `shared`."""
    workers: PositiveInt = 1
    """Number of processes. With `isolation = "sample"`, also the most samples played at once."""
    timeout_s: PositiveFloat = 60.0
    """Seconds for one call of an environment, or for its `run` between two turns of the policy. After that, the
    sample's outcome is `environment_timeout`."""
    total_timeout_s: NonNegativeFloat = 0.0
    """Seconds for all calls of an environment in one sample, without the turns of the policy. After that, the sample's
    outcome is `environment_timeout`. 0: no limit besides the number of turns."""
    memory_mb: NonNegativeInt = 0
    """Memory limit of each process, in MB; 0: no limit."""
    inherit_env: tuple[str, ...] = ()
    """Names of environment variables that the environment's processes inherit in addition to a short list without
    credentials. The processes always get the variables of `[run] env`."""
    writable: tuple[Path, ...] = ()
    """Existing folders that the environment's processes may change, such as the cache of a library. Everything else
    is read-only except a scratch folder and the temporary folders. The run directory stays closed and the installation of
    Python read-only, also in a folder of this list."""
    retries: PositiveInt = 2
    """Number of times that a sample is played again after its process died or hung; the last time alone in a
    process. A fault becomes a sample's outcome only if the sample was alone in its process."""


class FurtherEnvironmentKeys(EnvironmentKeys):
    """Core keys of an environment of `[[environments]]`."""

    algorithm: dict[str, Any] = {}
    """Algorithm for tasks of this environment: a name, or a table of name and options. Empty: the run's algorithm."""


class EnvironmentChoice(EnvironmentKeys, Choice):
    """A chosen environment, with its core keys."""

    @property
    def known_as(self) -> str:
        """The environment's unique name in the run."""
        return self.label or self.name


class FurtherEnvironmentChoice(FurtherEnvironmentKeys, EnvironmentChoice):
    """A chosen environment of `[[environments]]`, for the tasks that name it."""

    @property
    def learner(self) -> Chosen | None:
        """The environment's own algorithm; None if its table does not name an algorithm."""
        options = dict(self.algorithm)
        return Chosen("algorithm", options.pop("name"), options) if options else None


COMPONENT_TABLES: dict[str, tuple[type[Options], type[Choice]]] = {
    "environment": (EnvironmentKeys, EnvironmentChoice),
    "environments": (FurtherEnvironmentKeys, FurtherEnvironmentChoice),
    "engine": (BackendKeys, BackendChoice),
    "trainer": (BackendKeys, BackendChoice),
    "rewards": (RewardKeys, RewardChoice),
    "media": (MediaKeys, MediaChoice),
    "weights": (WeightKeys, WeightChoice),
    "sandbox": (SandboxKeys, SandboxChoice),
    "autoscale": (ScalingLimits, AutoscaleChoice),
}
"""Component table with core keys -> (model of these keys, class of the resolved table)."""
OUTLIVE_NAME = frozenset(
    {
        "weight",
        "only",
        "memory_mb",
        *EnvironmentKeys.model_fields,
        *WeightKeys.model_fields,
        *SandboxKeys.model_fields,
        *ScalingLimits.model_fields,
    }
)
"""Core keys that keep their values when another component is chosen, because they do not depend on the component."""
DEFAULT_NAMES = {
    "engine": "transformers",
    "trainer": "torch",
    "algorithm": "grpo",
    "environment": "single-turn",
    "family": "chat",
    "source": "files",
    "sampler": "shuffle",
    "weights": "shared-memory",
}
DEFAULT_SANDBOX = "bubblewrap"
"""Sandbox for rewards and environments, if the configuration does not name a sandbox."""
RUNNER_BUS = {"local": "in-process", "inline": "in-process", "ray": "ray"}
DEFAULT_STALENESS = {"colocate": 0, "hybrid": 1, "async": 1}


class Core(Options):
    """All keys of the core's tables and of the top level."""

    steps: PositiveInt = 200
    """Number of training steps; each step consumes `rollout.groups_per_step` groups."""
    epochs: PositiveFloat | None = None
    """Number of passes over the training tasks; replaces `steps`. Held-out tasks do not count, tasks that are skipped as
    too long do. A task that a filter rejects is replaced by another one."""
    seed: int = 0
    """Random seed of data order, sampling and initialisation."""
    max_staleness: NonNegativeInt | Literal["unbounded"] = 0
    """Most weight versions between sampling a token and training on it; 0: on-policy; `"unbounded"`: no bound. Default:
    0 with placement `colocate` or if `deterministic`, else 1."""
    deterministic: bool = False
    """Make every run of this configuration give the same weights, bit for bit, at a cost in speed."""
    plugins: tuple[Path, ...] = ()
    """Python files to load as plugins, in addition to the installed plugins."""
    model: ModelTable
    """The policy."""
    data: DataTable
    """The tasks."""
    teachers: tuple[TeacherTable, ...] = ()
    """Teachers: models that the policy learns from."""
    engines: tuple[EngineTable, ...] = ()
    """Engine pools for models besides the policy."""
    rollout: RolloutTable = RolloutTable()
    """Sampling from the policy."""
    optimizer: OptimizerTable = OptimizerTable()
    """The optimizer."""
    critic: CriticTable = CriticTable()
    """The critic, if the algorithm trains one."""
    reference: ReferenceTable = ReferenceTable()
    """The reference model, if the algorithm compares with one."""
    batch: BatchTable = BatchTable()
    """Optimizer updates of a step."""
    eval: EvalTable = EvalTable()
    """Evaluation sets and schedule."""
    placement: PlacementTable = PlacementTable()
    """Processes and devices of each role."""
    checkpoint: CheckpointTable = CheckpointTable()
    """Checkpoints."""
    export: ExportTable = ExportTable()
    """Exports of the model during training."""
    profile: ProfileTable = ProfileTable()
    """Profiles of chosen steps."""
    recovery: RecoveryTable = RecoveryTable()
    """Recovery from faults."""
    guards: GuardsTable = GuardsTable()
    """Guards against divergence."""
    run: RunTable = RunTable()
    """Name, runner and environment variables."""


class RunConfig(Core):
    """The whole resolved configuration of one run: the core's tables, and the choice of each component table."""

    algorithm: Choice
    """Algorithm that trains on the rows."""
    rewards: tuple[RewardChoice, ...] = ()
    """Rewards that judge the samples."""
    environment: EnvironmentChoice
    """Environment that answers the policy."""
    media: tuple[MediaChoice, ...] = ()
    """Processors of images, videos and sounds."""
    engine: BackendChoice
    """Inference engine that samples from the policy."""
    trainer: BackendChoice
    """Training backend of the policy."""
    family: Choice
    """Model family, which renders chats to tokens."""
    source: Choice
    """Task source, which reads task files."""
    sampler: Choice
    """Sampler that orders the tasks."""
    filters: tuple[Choice, ...] = ()
    """Filters that drop finished groups."""
    sinks: tuple[Choice, ...] = ()
    """Receivers of metrics."""
    bus: Choice
    """Bus, which stores the payloads of rows."""
    weights: WeightChoice
    """Transport of published weights."""
    autoscale: AutoscaleChoice | None = None
    """Scaling policy, which chooses the number of the policy's engines during the run."""
    sandbox: SandboxChoice | None = None
    """Sandbox in which rewards and environments run untrusted programs."""
    environments: tuple[FurtherEnvironmentChoice, ...] = ()
    """Further environments, for tasks that name them."""
    plugin_tables: dict[str, TableOptions] = {}
    """Tables of plugins that the configuration sets, by name."""

    def table(self, model: type[TableT]) -> TableT:
        """Return a plugin's table by its class; the default table if the configuration does not set the table."""
        return next((table for table in self.plugin_tables.values() if isinstance(table, model)), model())

    def dump(self) -> dict[str, object]:
        """Return plain data with every default written out; secrets stay references, and None is left out.

        Tables of plugins are only written if they are set.
        """
        data = self.model_dump(mode="json", exclude={*BY_TABLE, "plugin_tables"}, exclude_none=True)
        for table, kind in BY_TABLE.items():
            chosen = getattr(self, table)
            if kind.many:
                data[table] = [choice.dump() for choice in chosen]
            elif chosen is not None:
                data[table] = chosen.dump()
        for name, own in self.plugin_tables.items():
            data[name] = own.model_dump(mode="json", exclude_none=True)
        return data

    @property
    def staleness(self) -> int | None:
        """`max_staleness` as a number; None if unbounded."""
        return None if self.max_staleness == "unbounded" else self.max_staleness

    @property
    def engine_dtype(self) -> str:
        """Number format of the engines, in which weights are published."""
        return self.rollout.dtype or self.model.dtype

    def pool(self, name: str) -> EngineTable | None:
        """Return the engine pool with this name; None for an unknown name."""
        return next((pool for pool in self.engines if pool.name == name), None)

    def backend_of(self, pool: EngineTable) -> BackendChoice:
        """Return the engine backend of a pool: the pool's `engine` if set, else the engine of the policy."""
        if not pool.engine:
            return self.engine
        options = dict(pool.engine)
        name, python = options.pop("name"), options.pop("python", "")
        return BackendChoice(chosen=Chosen("engine", name, options), python=python)

    @property
    def algorithms(self) -> tuple[Chosen, ...]:
        """The run's algorithm, then the algorithms of environments, without repetitions."""
        found = [self.algorithm.chosen]
        for environment in self.environments:
            if environment.learner and environment.learner not in found:
                found.append(environment.learner)
        return tuple(found)

    @property
    def learner(self) -> Chosen:
        """The algorithm that roles build: the run's algorithm, or one choice that combines all `algorithms`."""
        several = self.algorithms
        return several[0] if len(several) == 1 else Chosen("algorithm", several[0].name, parts=several)

    def algorithm_of(self, environment: str) -> int:
        """Return the index in `algorithms` of the algorithm for tasks that name this environment."""
        own = next((each.learner for each in self.environments if each.known_as == environment), None)
        return 0 if own is None else self.algorithms.index(own)


RunContext: TypeAlias = Context[RunConfig]
"""Context of the core's own roles, which read a typed configuration."""


def core_tables() -> dict[str, type[Options]]:
    """Return the model of each core table, in order."""
    models = {name: models_in(field.annotation) for name, field in Core.model_fields.items()}
    return {name: cast(type[Options], own[0]) for name, own in models.items() if own}


def top_level_keys() -> tuple[str, ...]:
    """Return the keys that the configuration has outside of any table."""
    tables = core_tables()
    return tuple(name for name in Core.model_fields if name not in tables)


def keys_model(table: str) -> type[Options]:
    """Return the model of the core keys of a component table, without `name`."""
    return COMPONENT_TABLES[table][0] if table in COMPONENT_TABLES else Options


def table_keys() -> dict[str, list[str]]:
    """Return every table with its core keys; options of components are not included."""
    known = {name: list(model.model_fields) for name, model in core_tables().items()}
    return {**known, **{table: ["name", *keys_model(table).model_fields] for table in BY_TABLE}}


def to_toml(data: Mapping[str, Any], comment: Callable[[str], str] = lambda key: "") -> str:
    """Return plain data, such as that of `RunConfig.dump`, as TOML. Tables within tables are written on one line.

    `comment` returns the remark to write after a key, empty for none.
    """
    import tomlkit  # on first use: the processes of roles read this module, but write no TOML

    def fill(table: Any, values: Mapping[str, Any], prefix: str) -> Any:
        for key, value in values.items():
            path = f"{prefix}{key}"
            if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
                table[key] = tomlkit.aot()
                for index, item in enumerate(value):
                    table[key].append(fill(tomlkit.table(), item, f"{path}.{index}."))
            elif isinstance(value, Mapping) and not prefix:
                table[key] = fill(tomlkit.table(), value, f"{path}.")
            else:
                entry = tomlkit.inline_table() if isinstance(value, Mapping) else tomlkit.item(value)
                if isinstance(value, Mapping):
                    entry.update(value)
                if remark := comment(path):
                    entry.comment(remark)
                table[key] = entry
        return table

    return tomlkit.dumps(fill(tomlkit.document(), data, ""))


def literal(value: Any) -> str:
    """Return one value as TOML, on one line."""
    import tomlkit

    array = tomlkit.array()
    array.append(value)
    return array.as_string()[1:-1]
