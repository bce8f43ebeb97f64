# SPDX-License-Identifier: Apache-2.0
"""`RunConfig`, one run's whole configuration, resolved: typed core tables and chosen components; and the same as TOML.

`dump` gives plain data and `compose.parse_config` takes it back exactly: roles in other processes get it so. The standard
library parses TOML but does not write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.component import BY_TABLE, Chosen
from relax_core.api.options import Options
from relax_core.api.role import Context
from relax_core.config.annotation import PathText, models_in
from relax_core.config.guard_tables import GuardsTable
from relax_core.config.tables import (
    BatchTable,
    CheckpointTable,
    CriticTable,
    DataTable,
    EngineTable,
    EvalTable,
    ModelTable,
    NotifyTable,
    OptimizerTable,
    PlacementTable,
    RecoveryTable,
    RolloutTable,
    RunTable,
    TeacherTable,
)


class Choice(Options):
    """One component, chosen."""

    chosen: Chosen
    """Kind, name and options as plain data."""

    @property
    def name(self) -> str:
        return self.chosen.name

    def dump(self) -> dict[str, Any]:
        """The table as a person writes it: name, core keys, options."""
        keys = self.model_dump(mode="json", exclude={"chosen"}, exclude_none=True)
        return {"name": self.chosen.name, **keys, **self.chosen.options}


LABEL = r"^$|^[A-Za-z0-9][A-Za-z0-9._-]*$"


class BackendKeys(Options):
    """The core's keys of an engine or a trainer."""

    python: PathText = ""
    """Interpreter it runs in, such as `venvs/sglang/bin/python`; empty: this one."""


class RewardKeys(Options):
    """The core's keys of a reward."""

    label: str = Field("", pattern=LABEL)
    """Name under which it is logged, `reward/<label>`; empty: its own. Tells several of one name apart."""
    weight: float = 1.0
    """Factor in the sum of rewards."""
    timeout_s: PositiveFloat = 10.0
    """Longest time for one sample; then it is killed and the sample's outcome is `reward_timeout`."""
    memory_mb: NonNegativeInt = 0
    """Memory limit of its process; 0: none."""
    inherit_env: tuple[str, ...] = ()
    """Environment variables that its process sees besides a short list without credentials, by name, such as
    `OPENAI_API_KEY`; those of `[run] env` it sees in any case."""
    only: str = Field("", pattern=r"^$|^otherwise$|^[^=]+=")
    """Judge only tasks in which a column has this value, `source=algebra`; a dot goes into a table of the column. `otherwise`:
    those that the `only` of no other reward names."""


class MediaKeys(Options):
    """The core's keys of a modality processor."""

    timeout_s: PositiveFloat = 30.0
    """Longest time for one medium, reading it included; then it is killed and the outcome of its samples is `media_error`."""
    memory_mb: NonNegativeInt = 4096
    """Memory limit of its process; 0: none."""
    max_mb: PositiveInt = 256
    """Larger files, and longer answers of a URL, are refused."""
    preview_kb: NonNegativeInt = 512
    """Largest copy of a medium that is kept for the report page, where samples are shown; 0: none."""


class WeightKeys(Options):
    """The core's keys of the weight service."""

    payload: Literal["full", "delta"] = "full"
    """What is published: all tensors, or only the bytes that changed. Adapters (`model.lora`) travel alone
    where engine and transport take them, whatever stands here."""
    full_every: PositiveInt = 16
    """delta: a full version this often, so that a new engine has few deltas to load on top of it."""
    proof: Literal["auto", "wire", "resident", "behaviour"] = "auto"
    """What an engine must prove before it serves: the bytes that arrived, those in its memory, or that it gives a short
    sequence the trainer's log-probs too; `auto` is the bytes in its memory where it can tell, else those that arrived."""
    tolerance: PositiveFloat = 0.05
    """behaviour: largest difference of a log-prob."""
    timeout_s: PositiveFloat = 300.0
    """Deadline of a publish for one engine; one that is slower is replaced, the others go on."""


class WeightChoice(WeightKeys, Choice):
    """The transport of weights."""


class SandboxKeys(Options):
    """The core's keys of a sandbox."""

    programs: NonNegativeInt = 0
    """Programs that run at once, over all samples; 0: one for each core. Others wait, which costs them no time."""
    boxes: PositiveInt = 256
    """Samples that have a box at once."""


class SandboxChoice(SandboxKeys, Choice):
    """A sandbox."""


class BackendChoice(BackendKeys, Choice):
    """An engine or a trainer."""


class RewardChoice(RewardKeys, Choice):
    """A reward."""

    @property
    def known_as(self) -> str:
        """Name that is its own in the run."""
        return self.label or self.name


class MediaChoice(MediaKeys, Choice):
    """A modality processor."""


class EnvironmentKeys(Options):
    """The core's keys of an environment."""

    label: str = Field("", pattern=LABEL)
    """Name by which tasks name it; empty: its own. Tells several of one name apart."""
    isolation: Literal["auto", "shared", "sample"] = "auto"
    """`shared`: killable processes, each with many samples at once; `sample`: processes with one sample at a time, so that
    none feels another; `auto`: in the rollout's own process where the class declares that it can't block or crash
    (`in_process`), else `shared`."""
    workers: PositiveInt = 1
    """Processes. With `isolation = "sample"` no more samples than that are played at once."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one call of an instance (of `run`: between two turns of the policy); then the outcome of its sample
    is `environment_timeout`."""
    total_timeout_s: NonNegativeFloat = 0.0
    """Longest time of all calls of an instance together, without that in which the policy takes its turns; then the outcome
    of its sample is `environment_timeout` as well. 0: none, the number of turns bounds it."""
    memory_mb: NonNegativeInt = 0
    """Memory limit of each process; 0: none."""
    inherit_env: tuple[str, ...] = ()
    """Environment variables that its processes see besides a short list without credentials, by name; those of `[run] env`
    they see in any case."""
    retries: PositiveInt = 2
    """Times that a sample is played again after its process ended or fell silent, in the end alone in a process: only
    what breaks one that no other sample was in has the outcome of that."""


class FurtherEnvironmentKeys(EnvironmentKeys):
    """The core's keys of an environment beside the run's first."""

    algorithm: dict[str, Any] = {}
    """What learns from tasks of this environment: a name, or a table with a name and its options. Empty: the run's."""


class EnvironmentChoice(EnvironmentKeys, Choice):
    """An environment."""

    @property
    def known_as(self) -> str:
        """Name that is its own in the run."""
        return self.label or self.name


class FurtherEnvironmentChoice(FurtherEnvironmentKeys, EnvironmentChoice):
    """An environment for the tasks that name it."""

    @property
    def learner(self) -> Chosen | None:
        """Return the algorithm that the table itself names, or None."""
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
}
"""Component tables with keys of the core: the model of these keys, and the resolved form."""
OUTLIVE_NAME = frozenset(
    {"weight", "only", "memory_mb", *EnvironmentKeys.model_fields, *WeightKeys.model_fields, *SandboxKeys.model_fields}
)
"""Core keys that say nothing about the component, and so stay when another one is chosen."""
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
"""The sandbox of rewards and environments that need one, where the configuration names none."""
RUNNER_BUS = {"local": "in-process", "inline": "in-process", "ray": "ray"}
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
    recovery: RecoveryTable = RecoveryTable()
    """Recovery from faults."""
    guards: GuardsTable = GuardsTable()
    """Guards against divergence."""
    run: RunTable = RunTable()
    """The run itself."""
    notify: NotifyTable = NotifyTable()
    """Notifications."""


class RunConfig(Core):
    """One run's whole configuration, resolved: the core's tables, and for each component table what was chosen."""

    algorithm: Choice
    """What learns from the rows."""
    rewards: tuple[RewardChoice, ...] = ()
    """Judges of samples."""
    environment: EnvironmentChoice
    """What answers the policy."""
    media: tuple[MediaChoice, ...] = ()
    """Processors of images, videos and sounds."""
    engine: BackendChoice
    """What samples from the policy."""
    trainer: BackendChoice
    """What trains the policy."""
    family: Choice
    """How the model writes its text."""
    source: Choice
    """Reader of task files."""
    sampler: Choice
    """Order of tasks."""
    filters: tuple[Choice, ...] = ()
    """Reasons to drop finished groups."""
    sinks: tuple[Choice, ...] = ()
    """Receivers of metrics."""
    bus: Choice
    """Where payloads of rows are kept."""
    weights: WeightChoice
    """Transport of published weights."""
    scaling: Choice | None = None
    """Policy for the number of engines."""
    sandbox: SandboxChoice | None = None
    """Where rewards and environments run programs that nobody trusts."""
    environments: tuple[FurtherEnvironmentChoice, ...] = ()
    """Further ones, for tasks that name them."""

    def dump(self) -> dict[str, Any]:
        """Give plain data, every default written out; secrets stay references, and None is left out."""
        data = self.model_dump(mode="json", exclude=set(BY_TABLE), exclude_none=True)
        for table, kind in BY_TABLE.items():
            chosen = getattr(self, table)
            if kind.many:
                data[table] = [choice.dump() for choice in chosen]
            elif chosen is not None:
                data[table] = chosen.dump()
        return data

    @property
    def staleness(self) -> int | None:
        """`max_staleness` as a number; None is unbounded."""
        return None if self.max_staleness == "unbounded" else self.max_staleness

    @property
    def engine_dtype(self) -> str:
        """The engines' number format, in which weights are published."""
        return self.rollout.dtype or self.model.dtype

    def pool(self, name: str) -> EngineTable | None:
        """The pool of this name; None where there is none."""
        return next((pool for pool in self.engines if pool.name == name), None)

    def backend_of(self, pool: EngineTable) -> BackendChoice:
        """The backend of a pool's engines: its own, or that of the policy's."""
        if not pool.engine:
            return self.engine
        options = dict(pool.engine)
        name, python = options.pop("name"), options.pop("python", "")
        return BackendChoice(chosen=Chosen("engine", name, options), python=python)

    @property
    def algorithms(self) -> tuple[Chosen, ...]:
        """The run's algorithm and those of environments; each once."""
        found = [self.algorithm.chosen]
        for environment in self.environments:
            if environment.learner and environment.learner not in found:
                found.append(environment.learner)
        return tuple(found)

    @property
    def learner(self) -> Chosen:
        """The algorithm that roles build: that of the run, or all of them as one."""
        several = self.algorithms
        return several[0] if len(several) == 1 else Chosen("algorithm", several[0].name, parts=several)

    def algorithm_of(self, environment: str) -> int:
        """Index in `algorithms` of the one that learns from tasks that name this environment."""
        own = next((one.learner for one in self.environments if one.known_as == environment), None)
        return 0 if own is None else self.algorithms.index(own)


RunContext: TypeAlias = Context[RunConfig]
"""The context of the core's own roles: they read the configuration by its types."""


def core_tables() -> dict[str, type[Options]]:
    """The model of each core table, in order."""
    models = {name: models_in(field.annotation) for name, field in Core.model_fields.items()}
    return {name: cast(type[Options], own[0]) for name, own in models.items() if own}


def top_level_keys() -> tuple[str, ...]:
    """Keys that stand in no table."""
    tables = core_tables()
    return tuple(name for name in Core.model_fields if name not in tables)


def keys_model(table: str) -> type[Options]:
    """The model of the core's own keys of a component table; `name` is not among them."""
    return COMPONENT_TABLES[table][0] if table in COMPONENT_TABLES else Options


def table_keys() -> dict[str, list[str]]:
    """Every table with the keys that the core knows in it."""
    known = {name: list(model.model_fields) for name, model in core_tables().items()}
    return {**known, **{table: ["name", *keys_model(table).model_fields] for table in BY_TABLE}}


def to_toml(config: RunConfig, comment: Callable[[str], str] = lambda key: "") -> str:
    """Write the whole configuration as TOML that parses back to it; `comment` may add a remark to a key."""

    def lines(table: Mapping[str, Any], header: str, prefix: str) -> Iterator[str]:
        """Write the assignments of a table, then the tables in it: of the document all, else arrays such as `[[eval.sets]]`."""
        nested = {
            key: item for key, item in table.items()
            if (isinstance(item, list) and item and all(isinstance(one, Mapping) for one in item))
            or (isinstance(item, Mapping) and not header)
        }  # fmt: skip
        for key, value in table.items():
            if key not in nested:
                remark = comment(f"{prefix}{key}")
                yield f"{toml_key(key)} = {literal(value)}" + (f"  # {remark}" if remark else "")
        for key, value in nested.items():
            name = f"{header}.{toml_key(key)}" if header else toml_key(key)
            if isinstance(value, Mapping):
                yield from ("", f"[{name}]", *lines(value, name, f"{prefix}{key}."))
            else:
                for at, item in enumerate(value):
                    yield from ("", f"[[{name}]]", *lines(item, name, f"{prefix}{key}.{at}."))

    return "\n".join(lines(config.dump(), "", "")) + "\n"


def toml_key(key: str) -> str:
    """Write a key, bare where TOML allows it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else literal(key)


def literal(value: Any) -> str:
    """Write one value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return re.sub(r"e([+-])0+", r"e\1", repr(value))
    if isinstance(value, Mapping):
        items = ", ".join(f"{toml_key(str(key))} = {literal(item)}" for key, item in value.items() if item is not None)
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(item) for item in value)}]"
    return str(value)
