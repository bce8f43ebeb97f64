# SPDX-License-Identifier: Apache-2.0
"""The survey of task files for `relax data`, which continues past bad rows.

Files are given directly or by a configuration. The processors of a run decode the media in killable processes; decoded
media are not kept.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from relax_core.api.algorithm import Algorithm, Source as Form
from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError, PluginError, one_line
from relax_core.api.family import ModelFamily
from relax_core.api.media import MediaPipeline
from relax_core.api.modality import ModalityProcessor
from relax_core.api.role import SystemClock
from relax_core.api.source import BadRow, TaskSource
from relax_core.api.task import Media, MediaKind, Task
from relax_core.cli.terminal import run_to_end
from relax_core.config.checks import learns_from_teachers
from relax_core.config.tables import DataTable, EvalSetTable
from relax_core.control.tool_check import tools_before_start
from relax_core.data.dataset import Dataset, DatasetSettings, dataset_settings
from relax_core.data.media import media_pipeline
from relax_core.data.overlap import EvalRows, Overlap, RowContent, Rows, find_overlap, kept_apart, row_content
from relax_core.data.task_files import source_access
from relax_core.data.tasks import (
    HOLD_OUT,
    TaskSet,
    TaskSettings,
    charged_to,
    draw_hold_out,
    has_value,
    read_task,
    task_settings,
    unmatched_filters,
)
from relax_core.launch import Catalogue, MediaChoice, RewardChoice, RunConfig, compose
from relax_core.media.access import SourceAccess
from relax_core.media.placeholders import MediaRefused, media_of
from relax_core.media.source import shown
from relax_core.rewards.golds import GoldReport, check_golds
from relax_core.rewards.host import reads_golds
from relax_core.rewards.scorer import RewardScorer
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers

REMEMBERED = 1 << 14
"""Most media whose facts are cached, since many rows may show the same medium."""


@dataclass(frozen=True, slots=True)
class Processors:
    """The modality processors for the media of a file, with the model and settings that they need."""

    choices: Sequence[MediaChoice]
    model: dict[str, Any]
    family: ModelFamily
    access: SourceAccess
    pipeline: str
    """Class of the media pipeline; empty without processors."""
    plugin_files: Sequence[str] = ()


@asynccontextmanager
async def opened(processors: Processors, preview_kb: int = 0) -> AsyncIterator[MediaPipeline]:
    """Open a media pipeline with an empty temporary store."""
    choices = [choice.model_copy(update={"preview_kb": preview_kb}) for choice in processors.choices]
    workers = LocalWorkers(processors.plugin_files)
    with tempfile.TemporaryDirectory(prefix="relax-data-") as directory:
        pipeline = media_pipeline(
            processors.pipeline, choices, processors.family, ProcessStarter(workers), directory, processors.model,
            None, SystemClock(), processors.access,
        )  # fmt: skip
        try:
            await pipeline.start()
            yield pipeline
        finally:
            await pipeline.stop()
            await workers.close()


async def survey_media(file: DataFile, result: Survey) -> None:
    """Decode all media of the usable rows; mark rows with unreadable media as bad, and add media tokens to lengths."""
    processors = file.processors
    rows = {row: list(shown_by(read_task(file.source, row))) for row in sorted(result.rows)}
    if processors is None or not any(rows.values()):
        return
    examined: OrderedDict[Media, dict[str, Any] | str] = OrderedDict()
    async with opened(processors) as pipeline:
        for row, media in rows.items():
            tokens = 0
            for number, medium in enumerate(media, 1):
                described = examined[medium] if medium in examined else await _examined(pipeline, medium)
                examined[medium] = described
                if len(examined) > REMEMBERED:
                    examined.popitem(last=False)
                if isinstance(described, str):
                    reason = f"{medium.kind} {shown(medium.source)}: {described}"
                    place = f"medium {number} of the prompt"
                    result.refuse(row, BadRow(file.source.where(row), reason, place, _fix(described)))
                    break
                result.count_medium(medium.kind, described)
                tokens += described["tokens"] - 1
            else:
                result.lengthen(row, tokens, file.limit, file.source.where(row), file.too_long)


async def survey_golds(file: DataFile, result: Survey) -> None:
    """Score the gold answers of the usable rows; mark rows as bad whose gold answer does not earn the best score."""
    workers = LocalWorkers(file.plugin_files)
    scorer = RewardScorer(file.rewards, ProcessStarter(workers), SystemClock(), filters=file.filters)
    try:
        await scorer.start()
        tasks = file.tasks if isinstance(file.tasks, TaskSet) else file.source
        result.golds = await check_golds(scorer, tasks, sorted(result.rows))
    finally:
        await scorer.stop()
        await workers.close()
    for gold in result.golds.bad:
        result.refuse(gold.index, BadRow(gold.where, f"reward {gold.reward}: {gold.reason}", "answer"))


async def facts(file: DataFile, task: Task) -> list[dict[str, Any]]:
    """Return facts about each medium of a task: kind, source, header, tokens, key and preview; or its `error`."""
    if file.processors is None:
        return []
    described = []
    async with opened(file.processors, preview_kb=2048) as pipeline:
        for media in shown_by(task):
            fact = await _examined(pipeline, media)
            described.append(
                {
                    "kind": media.kind,
                    "source": shown(media.source),
                    **({"error": fact} if isinstance(fact, str) else fact),
                }
            )
    return described


def shown_by(task: Task) -> Iterator[Media]:
    yield from () if isinstance(task.prompt, str) else media_of(task.prompt)


def _fix(reason: str) -> str:
    if "No such file" in reason:
        return "correct the path, which is relative to the task file, or add the missing file"
    if "fetched" in reason or "data.media." in reason:
        return ""  # the reason contains the fix
    if "longer than" in reason or "broke the process" in reason:
        return "remove the row, or raise timeout_s or memory_mb of the medium's processor"
    if "at most" in reason or "more than" in reason:
        return "shrink the medium, or raise the limit of its processor"
    return "replace the file, or remove the row"


async def _examined(pipeline: MediaPipeline, media: Media) -> dict[str, Any] | str:
    try:
        return await pipeline.examine(media)
    except MediaRefused as refused:
        return str(refused)


def _default_choices(catalogue: Catalogue) -> dict[str, MediaChoice]:
    """Return one installed modality processor with default settings for each kind of medium, by kind."""
    choices: dict[str, MediaChoice] = {}
    for name in catalogue.names("modality-processor"):
        try:
            kind = str(cast(type[ModalityProcessor], catalogue.target("modality-processor", name)).medium)
        except (ImportError, ConfigError):
            continue  # its dependencies are missing; rows with such media report that
        if kind in get_args(MediaKind):
            choices.setdefault(kind, MediaChoice(chosen=Chosen("modality-processor", name)))
    return choices


@dataclass(frozen=True, slots=True)
class DataFile:
    """An opened task file with the objects that read the file. Some of these objects need a model."""

    path: str
    source: TaskSource
    refused: ConfigError | None
    """Error of `open` for a file with bad rows, whose remaining rows can still be read; None: no bad rows."""
    family: ModelFamily | None = None
    tasks: TaskSet | Dataset | None = None
    """Tasks without row checks; None if no model is given."""
    processors: Processors | None = None
    """Processors of the file's media; None if no model is given."""
    limit: int | None = None
    """Most tokens of a prompt; None: no limit."""
    too_long: str = "skip"
    rewards: Sequence[RewardChoice] = ()
    """Rewards that read the gold answers of the file's tasks."""
    filters: Sequence[str] = ()
    """Filters `only` of all rewards of the run."""
    plugin_files: Sequence[str] = ()
    evaluated: EvalSetTable | None = None
    """Table of the evaluation set whose file this is; None: the training file, or a file without a configuration."""
    config: RunConfig | None = None
    """Configuration that names the file; None for a file without a configuration."""
    unmatched: Callable[[], Iterable[ConfigError]] = tuple
    """Returns the errors that are known once all rows of all files of a configuration were read."""


@dataclass(slots=True)
class Survey:
    """The survey of one data file: its rows and columns."""

    path: str
    bad: list[BadRow]
    usable: int = 0
    skipped: int = 0
    remarks: Sequence[str] = ()
    """Sentences about values that tasks lack or have in part."""
    warnings: Sequence[str] = ()
    """Sentences about tasks that are held out for evaluation."""
    columns: Counter[str] = field(default_factory=Counter)
    """Number of tasks with a value, by column."""
    rows: dict[int, int] = field(default_factory=dict)
    """Tokens of each usable prompt, by row; 0 if no model is given."""
    overlap: Overlap | None = None
    """Usable rows that repeat each other, and for an evaluation set those that are also in the training file."""
    golds: GoldReport | None = None
    """Result of scoring the gold answers of the usable rows; None without a reward that reads gold answers."""
    media: dict[str, dict[str, float]] = field(default_factory=dict)
    """Totals by kind of medium: number of decoded media, their tokens, bytes and seconds."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each usable prompt; empty if no model is given."""
        return [length for length in self.rows.values() if length]

    def refuse(self, row: int, bad: BadRow) -> None:
        """Change a usable row to a bad one."""
        del self.rows[row]
        self.usable -= 1
        self.bad.append(bad)

    def count_medium(self, kind: str, described: Mapping[str, Any]) -> None:
        """Add a decoded medium to the totals of its kind."""
        sums = self.media.setdefault(kind, {"count": 0, "tokens": 0, "size_bytes": 0, "seconds": 0.0})
        sums["count"] += 1
        for name in ("tokens", "size_bytes", "seconds"):
            sums[name] += float(described.get(name) or 0)

    def lengthen(self, row: int, tokens: int, limit: int | None, where: str, too_long: str) -> None:
        """Add the media's `tokens` to a prompt's length; skip or refuse a row that becomes longer than `limit`."""
        length = self.rows[row] + tokens
        if limit is None or length <= limit:
            self.rows[row] = length
        elif too_long == "error":
            got = f"{length} tokens with its media; data.max_prompt_tokens allows {limit}"
            self.refuse(row, BadRow(where, got, "prompt", "lower the limits of the media's processor"))
        else:
            del self.rows[row]
            self.usable -= 1
            self.skipped += 1


def _pipeline(choices: Sequence[MediaChoice], catalogue: Catalogue) -> str:
    """Return the class that hosts the processors; empty without processors. Raises ConfigError if no plugin offers it."""
    hook = "relax_media_pipeline"
    for error in catalogue.lacking(hook, "media", ", ".join(choice.name for choice in choices)) if choices else ():
        raise error
    return str(catalogue.part(hook)) if choices else ""


def data_files(file: Path, model: Path | None, reward: str = "") -> Iterator[DataFile]:
    """Open the file, or the training file and evaluation sets that a TOML file names.

    `reward`: a reward with default options that reads the gold answers of a task file; a TOML file has its own rewards.
    """
    model = model and model.absolute()  # processors of media work in another folder
    if file.suffix != ".toml":
        catalogue = Catalogue.load()
        family = _family(catalogue, Chosen("model-family", "chat"), {"path": str(model)}) if model else None
        choices = _default_choices(catalogue) if family else {}
        access = source_access(DataTable(train=file), [file])
        pipeline = _pipeline([*choices.values()], catalogue)
        read = Processors([*choices.values()], {"path": str(model)}, family, access, pipeline) if family else None
        settings = TaskSettings(media=[*choices], access=access)
        opened = _opened(str(file), {}, _source_for(file, catalogue), family, settings, processors=read)
        judges = [RewardChoice(chosen=Chosen("reward", reward))] if reward else []
        yield replace(opened, rewards=_reading(judges, catalogue, f"--reward {reward}"))
        return
    if reward:
        raise ConfigError("--reward", reward, f"leave it out: {file} names its rewards")
    composed = compose([file], [f"model.path={json.dumps(str(model.absolute()))}"] if model else [], checked=False)
    for config in [stage.config for stage in composed.stages] or [composed.config]:
        yield from _of_config(config, composed.catalogue)


def _of_config(config: RunConfig, catalogue: Catalogue) -> Iterator[DataFile]:
    """Open a configuration's training file and evaluation sets."""
    family = _family(catalogue, config.family.chosen, config.model.model_dump(mode="json"))
    form = cast(type[Algorithm], catalogue.target("algorithm", config.algorithm.name)).source
    tools = tools_before_start(config, catalogue) if form is Form.ROLLOUT else {}
    files: list[tuple[Path, Mapping[str, str], EvalSetTable | None]] = [(config.data.train, config.data.columns, None)]
    files += [(table.path, table.columns, table) for table in config.eval.sets]
    plugins = [str(path) for path in config.plugins]
    model = config.model.model_dump(mode="json")
    judges = config.rewards if form is Form.ROLLOUT else ()
    filters = [choice.only for choice in judges]
    teachers = config.teachers if learns_from_teachers(config, catalogue) else ()
    sets: list[TaskSet] = []
    for number, (path, columns, table) in enumerate(files, 1):
        settings: TaskSettings | DatasetSettings = (
            task_settings(config, catalogue.build, str(path), tools, () if sets else teachers, table)
            if form is Form.ROLLOUT
            else dataset_settings(config, catalogue.build, str(path))
        )
        access = source_access(config.data, [path])
        read = Processors(config.media, model, family, access, _pipeline(config.media, catalogue), plugins)
        source = cast(TaskSource, catalogue.build(config.source.chosen))
        opened = _opened(str(path), columns or config.data.columns, source, family, settings, form, read)
        sets += [opened.tasks] if isinstance(opened.tasks, TaskSet) else []
        opened = replace(
            opened, rewards=_reading(judges, catalogue), filters=filters, plugin_files=plugins, evaluated=table,
            config=config,
        )  # fmt: skip
        # Filters are judged by the rows of all files, so after the last file.
        yield replace(opened, unmatched=partial(unmatched_filters, config, sets)) if number == len(files) else opened


def survey_overlap(file: DataFile, result: Survey, trained: tuple[DataFile, Survey] | None) -> None:
    """Compare the usable rows of a file with each other, and those of an evaluation set with the training file.

    `trained`: the training file of the same configuration and its survey. Marks the set as bad if more of its tasks
    than `max_overlap` are in the training file.
    """
    rows = sorted(result.rows)
    if file.evaluated is None or trained is None or file.config is None:
        result.overlap = find_overlap(_contents(file), rows, {})
        if file.config is not None and file.config.eval.num_held_out != 0 and rows:
            _survey_hold_out(file, result, rows, file.config)
        return
    name, used = file.evaluated.name, rows[: file.evaluated.size]
    shared = find_overlap(_contents(trained[0]), sorted(trained[1].rows), {name: EvalRows(_contents(file), used)})
    result.overlap = shared
    try:
        shared.sets[name].refuse("eval.max_overlap", file.config.eval.max_overlap)
    except ConfigError as error:
        result.bad.append(BadRow(file.path, f"got {error.got}", error.field, error.fix))


def _survey_hold_out(file: DataFile, result: Survey, rows: Sequence[int], config: RunConfig) -> None:
    """Hold out tasks of the usable rows as a run would; store its warnings and its refusal."""
    try:
        held = draw_hold_out(rows, config.eval.num_held_out, config.seed)
        train, sets = [row for row in rows if row not in held], {HOLD_OUT: EvalRows(_contents(file), sorted(held))}
        _, said = kept_apart(config, _contents(file), train, sets)
    except ConfigError as error:
        result.bad.append(BadRow(file.path, f"got {error.got}", error.field, error.fix))
    else:
        result.warnings = [text for level, text in said if level == "warning"]


def survey_faults(file: DataFile, result: Survey, rows: Sequence[int]) -> None:
    """Mark usable rows as bad whose tokens lack words of the row. Without a model, nothing is checked."""
    if file.tasks is None:
        return
    for row in rows:
        if fault := next(file.tasks.faults(row), ""):
            fix = "name the template and the tokenizer with which the model was trained, or correct the row"
            result.refuse(row, BadRow(file.source.where(row), fault, "model.chat_template", fix))


@dataclass(frozen=True, slots=True)
class _SourceRows:
    """The rows of a task source, which has no tasks without a model, for the comparison of rows."""

    source: TaskSource

    def __len__(self) -> int:
        return len(self.source)

    def content(self, index: int) -> RowContent:
        return row_content(self.source[index])

    def where(self, index: int) -> str:
        return self.source.where(index)


def _contents(file: DataFile) -> Rows:
    return file.tasks or _SourceRows(file.source)


def survey(file: DataFile, media: bool = False) -> Survey:
    """Read every row; with `media`, also decode all media of the rows."""
    result = Survey(file.path, list(file.source.problems()), remarks=list(file.source.remarks()))
    for row in range(len(file.source)):
        try:
            task = read_task(file.source, row)
        except PluginError as error:
            result.bad.append(BadRow(f"row {row}", str(error), fix="correct the task source"))
            continue
        result.columns["prompt"] += 1
        result.columns["answer"] += has_value(task.answer)
        result.columns.update(name for name, value in task.metadata.items() if has_value(value))
        try:
            rendered = file.tasks.examine(row) if file.tasks else None
        except ConfigError as error:
            result.bad.append(BadRow(file.source.where(row), str(error), error.field, str(error.fix)))
            continue
        except Exception as error:  # one hostile row must not hide the other rows
            reason = f"rendering fails with {type(error).__name__}: {one_line(str(error))}"
            result.bad.append(BadRow(file.source.where(row), reason, "prompt", "correct the row, or leave it out"))
            continue
        if rendered or not file.tasks:
            result.rows[row] = len(rendered.tokens) if rendered else 0
            result.usable += 1
        else:
            result.skipped += 1
    if file.rewards and result.rows:
        run_to_end(survey_golds(file, result))
    result.bad += [BadRow(error.field, f"got {error.got}", error.field, error.fix) for error in file.unmatched()]
    if media:
        if file.processors is None:
            fix = "give the model folder, whose config.json defines the tokens of media: --model DIR"
            raise ConfigError("--media", "no model folder", fix)
        run_to_end(survey_media(file, result))
    return result


def _opened(
    path: str, columns: Mapping[str, str], source: TaskSource, family: ModelFamily | None,
    settings: TaskSettings | DatasetSettings, form: Form = Form.ROLLOUT, processors: Processors | None = None,
) -> DataFile:  # fmt: skip
    refused = None
    try:
        with charged_to(source):
            source.open(path, columns)
    except ConfigError as error:
        refused = error
        if not any(True for _ in source.problems()):
            raise
    if family is None:
        return DataFile(path, source, refused)
    if isinstance(settings, TaskSettings):
        tasks = TaskSet(source, family, settings, check=False)
        return DataFile(path, source, refused, family, tasks, processors, settings.max_prompt_tokens, settings.too_long)
    rows = Dataset(source, family, form, settings, check=False)
    return DataFile(path, source, refused, family, rows, processors, None, settings.too_long)


def _reading(rewards: Sequence[RewardChoice], catalogue: Catalogue, key: str = "") -> list[RewardChoice]:
    """Return the rewards that read gold answers. If `key` is set, raises ConfigError naming `key` for any other reward."""
    reading = [reward for reward in rewards if reads_golds(cast(Any, catalogue.target("reward", reward.name)))]
    if key and len(reading) < len(rewards):
        raise ConfigError(key, "a reward that reads no gold answers", "name a reward that does, such as maths or exact")
    return reading


def _family(catalogue: Catalogue, chosen: Chosen, model: Mapping[str, Any]) -> ModelFamily:
    family = cast(ModelFamily, catalogue.build(chosen))
    family.open(model)
    return family


def _source_for(file: Path, catalogue: Catalogue) -> TaskSource:
    """Return the task source for files with this suffix, or for a folder."""
    readable: list[str] = []
    for name in catalogue.names("task-source"):
        suffixes = cast(type[TaskSource], catalogue.target("task-source", name)).suffixes
        if file.suffix in suffixes or (file.is_dir() and name == "files"):
            return cast(TaskSource, catalogue.build(Chosen("task-source", name)))
        readable += suffixes
    raise ConfigError("FILE", file, f"give a .toml file or a task file ({', '.join(sorted(readable))})")
