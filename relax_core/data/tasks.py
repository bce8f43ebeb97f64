# SPDX-License-Identifier: Apache-2.0
"""The tasks of a run: rows of a task source with the system prompt, checked once and tokenized once.

This module decides which rows may be issued. The sampler decides the order of rows. The task source reads a row.
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from relax_core.api.environment import Environment, Tool
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.message_words import THINKS
from relax_core.api.modality import ModalityProcessor
from relax_core.api.model_folder import bounded_context
from relax_core.api.reward import Reward
from relax_core.api.source import TaskSource
from relax_core.api.task import Message, Task
from relax_core.config.run_config import RunConfig, RunContext
from relax_core.config.tables import EvalSetTable, TeacherTable
from relax_core.data.overlap import RowContent, row_content
from relax_core.data.plain_data import plain
from relax_core.data.row_proof import prompt_faults
from relax_core.data.row_tools import COLUMN as TOOLS, row_tools
from relax_core.data.task_files import TaskFiles, source_access
from relax_core.data.task_row import RowError
from relax_core.media.access import SourceAccess
from relax_core.media.placeholders import media_of, misplaced
from relax_core.media.source import check_source, missing_file, shown
from relax_core.observe.files import read_document, write_document
from relax_core.registry.error_text import authored
from relax_core.registry.shapes import checked, returned_by
from relax_core.rpc.messages import encode

EVAL_SET = "eval_set"
"""Column with the name of the evaluation set, in the tasks of `[[eval.sets]]`; rewards may select tasks by it."""
HOLD_OUT = "held-out"
"""Name of the evaluation set that is held out of the training tasks."""
MOST_HELD_OUT = 128
"""Most tasks that are held out if the configuration does not name their number."""
HELD_OUT_FILE = "held-out.json"
"""File of the run directory with the numbers of the held-out rows; a resume never trains these rows."""
NOT_SHOWN = f'to keep the column as data for rewards, rename it: columns = {{described = "{TOOLS}"}}'
OTHERWISE = "otherwise"
"""Value of a reward's `only` for the tasks that no reward with a filter selects."""
SINGLE_TURN = "single-turn"
"""Name of the environment whose samples are one answer to the prompt."""
TOO_LONG = ("skip", "truncate", "error")
CACHED_PROMPTS = 4096  # enough for the groups in flight, whose samples share a prompt; an epoch need not fit
MANY_TOKENS = 64
PROBE_SLACK = 8  # tokens by which tokenization may differ where template and words meet


@dataclass(frozen=True, slots=True)
class ColumnNeed:
    """The columns that a component reads from tasks."""

    component: str
    columns: tuple[str, ...]
    applies: Callable[[Task], bool] = lambda task: True
    """Returns True for tasks that the component handles; a reward may judge only some tasks."""


Rule = Callable[[Task], tuple[str, str, str] | None]
"""A requirement of a run on each task: returns None, or the field, the fault after "which", and the fix of an error."""


class RowSet(ABC):
    """The rows of a task source that may be issued, by index. The sampler decides their order.

    Invariants:
    - with checks on, only rows that were usable when the set was opened are kept; `num_skipped` counts long rows;
    - only row numbers are kept: a row is read and rendered on request.
    """

    limit_key: ClassVar[str]
    """Configuration key of the token limit."""
    a_row: ClassVar[str] = ""
    """Text before a row's location in the error that the row is too long."""
    skipped: ClassVar[str]
    """Text after the number of skipped rows in a log sentence: the noun for rows first, then the reason."""
    emptied: ClassVar[tuple[str, str]]
    """Consequence and fix in the error that a token limit leaves no row."""

    def __init__(
        self, source: TaskSource, family: ModelFamily, system_prompt: str, limit: int | None, too_long: str,
        media: Sequence[str], access: SourceAccess,
    ) -> None:  # fmt: skip
        """Create the set of all rows of an open source; `family` must be open too.

        `media`: kinds of media that the run has processors for. `access`: limits on the sources of media.
        """
        if too_long not in TOO_LONG:
            raise ConfigError("data.too_long", repr(too_long), f"choose {', '.join(TOO_LONG)}")
        self.family = family
        self._source, self._system_prompt, self._limit, self._too_long = source, system_prompt, limit, too_long
        self._media, self._access = frozenset(media), access
        self._overheads: dict[Hashable, int] = {}
        foreign = [*family.foreign_tokens.values()]
        self._foreign = foreign if len(foreign) < MANY_TOKENS else [""]  # "": render every row
        with charged_to(source):
            self._kept = array("q", range(len(source)))
        self.num_skipped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Task:
        return self._task(self._kept[index])

    def where(self, index: int) -> str:
        """Return the location of a row, such as `file:line`."""
        return self._source.where(self._kept[index])

    @abstractmethod
    def content(self, index: int) -> RowContent:
        """Return the part of a row that decides whether two rows are equal; `data.system_prompt` is not part."""

    def hold_out(
        self, size: int | None, seed: int, run_dir: str = "", *, stores: bool = True
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return sorted (train, held-out) indices. The held-out rows are those that the run in `run_dir` began with.

        A new run draws `hold_out_size` rows; equal seeds draw equal rows. With `stores`, their numbers are stored in
        `run_dir`. An empty `run_dir` stands for no run.
        """
        count, stored = len(self), stored_hold_out(Path(run_dir)) if run_dir else None
        if stored is not None and stored.rows is not None:
            held = frozenset(index for index, row in enumerate(self._kept) if row in stored.rows)
        else:
            held = draw_hold_out(range(count), size if stored is None else stored.size, seed)
            if run_dir and stores:
                store_hold_out(Path(run_dir), len(held), sorted(self._kept[index] for index in held))
        train = tuple(index for index in range(count) if index not in held) if held else range(count)
        return train, tuple(sorted(held))

    def remarks(self, train: Sequence[int]) -> list[str]:
        """Return log sentences about values, skipped and held-out rows; `train`: indices of the rows for training."""
        with charged_to(self._source):
            said = list(self._source.remarks())
        said += [f"{self.num_skipped} {self.skipped}"] if self.num_skipped else []
        if held := len(self) - len(train):
            rows = self.skipped.split()[0]
            said.append(
                f"{held} of {len(self)} {rows} are held out for evaluation; set [[eval.sets]] to use a separate set"
            )
        return said

    @abstractmethod
    def faults(self, index: int) -> Iterator[str]:
        """Yield the faults that the proof of a row's tokens finds."""

    @abstractmethod
    def examine(self, row: int) -> Rendered | None:
        """Check and render a row of the source; return None for a skipped row. Raises ConfigError for a bad row."""

    @abstractmethod
    def _usable(self, row: int) -> bool:
        """Return False for a row to skip. Raises ConfigError for a bad row."""

    def _check(self) -> None:
        """Read every row once and keep the usable rows. Raises ConfigError if no row is left."""
        kept = array("q", (row for row in range(len(self._source)) if self._usable(row)))
        self.num_skipped = len(self._kept) - len(kept)
        self._kept = kept
        if not kept:
            raise ConfigError(self.limit_key, f"{self._limit}, which {self.emptied[0]}", self.emptied[1])

    def _read(self, row: int) -> Task:
        """Read a row, as plain data if other processes could not receive the row otherwise. Raises ConfigError."""
        task = read_task(self._source, row)
        if isinstance(self._source, TaskFiles):  # already plain data
            return task
        try:
            encode(task)
        except (TypeError, ValueError, OverflowError):
            try:
                task = replace(task, answer=plain(task.answer), metadata=plain(task.metadata))
                encode(task)
            except (TypeError, ValueError, OverflowError) as error:
                fix = "the task source must give whole text, numbers, lists and tables of them"
                got = f"{self._source.where(row)}, which can't be sent to other processes ({error})"
                raise ConfigError("source", got, fix) from error
        return task

    def _task(self, row: int) -> Task:
        """Read a row and put the system prompt before its messages, unless the row has a system message."""
        return self._with_system_prompt(self._read(row), row)

    def _with_system_prompt(self, task: Task, row: int) -> Task:
        if not self._system_prompt:
            return task
        if isinstance(task.prompt, str):
            got = f"{self._source.where(row)}, whose prompt is a bare string that goes to the model as it stands"
            fix = 'write the prompt as messages, [{"role": "user", "content": ...}], or leave the system prompt out'
            raise ConfigError("data.system_prompt", got, fix)
        if any(message.role == "system" for message in task.prompt):
            return task
        return replace(task, prompt=(Message("system", self._system_prompt), *task.prompt))

    def _row_tools(self, task: Task, row: int) -> tuple[Tool, ...]:
        """Return the tools of a row's column `tools`. Raises ConfigError for tools that no prompt can show."""
        where = self._source.where(row)
        try:
            tools = row_tools(task.column(TOOLS))
        except RowError as error:
            raise ConfigError("data.train", f"{where}: {error}", "correct the row") from error
        if tools and isinstance(task.prompt, str):
            got = f"{where}, whose {TOOLS} a prompt of plain text can't show"
            raise ConfigError("data.train", got, f"write the prompt as messages; {NOT_SHOWN}")
        return tools

    def _check_media(self, messages: Sequence[Message], row: int) -> None:
        """Raise ConfigError unless the run can read a row's media: kinds, sources, and the existence of local files."""
        for media in media_of(messages):
            where = f"{media.kind} {shown(media.source)} at {self._source.where(row)}"
            if media.kind not in self._media:
                fix = f'no processor reads this kind: set media = ["{media.kind}"], or leave such rows out'
                raise ConfigError("media", where, fix)
            if media.kind not in self.family.placeholders:
                fix = f"the model's config.json has no {media.kind}_token_id; choose a model that reads this kind"
                raise ConfigError("model.path", where, fix)
            try:
                check_source(media.source, self._access)
            except ConfigError as refused:
                got = f"{media.kind} {refused.got} at {self._source.where(row)}"
                raise ConfigError(refused.field, got, refused.fix) from refused
            if missing_file(media.source):
                fix = "there is no such file; paths are relative to the task file, and base64 text begins with data:;base64,"
                raise ConfigError("data.train", where, fix)

    def _surely_fits(self, messages: Sequence[Message], form: Hashable, probe: Callable[[], int]) -> bool:
        """Return True if the number of characters proves that a text fits the token limit, to avoid most tokenizing.

        Only ASCII text can be proved to fit: each of its tokens has one character or more. `probe` counts the tokens
        that the template adds to messages of this form; it is called once per form.
        """
        if any(
            m.tool_calls
            or m.extra
            or m.name
            or not isinstance(m.content, str)
            or not m.content.isascii()
            or THINKS.search(m.content)
            or any(text in m.content for text in self._foreign)
            for m in messages
        ):  # only rendering finds a field that the template drops, or a thought that does not fit the template
            return False
        if form not in self._overheads:
            self._overheads[form] = probe()
        return sum(len(m.text) for m in messages) + self._overheads[form] + PROBE_SLACK <= (self._limit or 0)

    def _too_long_error(self, row: int, length: int) -> ConfigError:
        got = f"{self._limit}, but {self.a_row}{self._source.where(row)} has {length} tokens"
        return ConfigError(self.limit_key, got, 'raise it, or set data.too_long = "skip" or "truncate"')

    def _check_ids(self, tokens: Sequence[int], row: int) -> None:
        """Raise ConfigError for a token that the model's vocabulary lacks."""
        foreign = self.family.foreign_tokens
        wrong = next((token for token in tokens if token in foreign), None) if foreign else None
        if wrong is not None:
            got = f"{self._source.where(row)}, whose token {wrong} ({foreign[wrong]!r}) the model does not have"
            raise ConfigError("data.train", got, "remove the text, or set model.tokenizer to the model's own tokenizer")

    @contextmanager
    def _named(self, row: int) -> Iterator[None]:
        """Add a row's location to a ConfigError that rendering the row raises."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(error.field, f"{error.got} at {self._source.where(row)}", error.fix) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    """The rules for the tasks of one file."""

    system_prompt: str = ""
    max_prompt_tokens: int | None = None
    too_long: str = "skip"
    """Rule for prompts of more than `max_prompt_tokens`, as in `data.too_long`."""
    needs: Sequence[ColumnNeed] = ()
    tools: Sequence[Tool] = ()
    """Tools of a task whose environment is not in `tools_of`."""
    tools_of: Mapping[str, Sequence[Tool]] = field(default_factory=dict)
    """Tools by environment name."""
    media: Sequence[str] = ()
    access: SourceAccess = field(default_factory=SourceAccess)
    rules: Sequence[Rule] = ()
    filters: Sequence[str] = ()
    """The filters `only` of rewards and teachers; filters that select no checked task stay in `TaskSet.unmatched`."""
    answered_once: Callable[[Task], bool] = lambda task: True
    """Function that returns True for a task without a multi-turn environment: the prompt alone decides what the policy
    reads."""
    eval_set: str = ""
    """Name of the evaluation set, which becomes a column of each task; empty for the tasks to train on."""


class TaskSet(RowSet):
    """Tasks for a rollout, each with its rendered prompt.

    Invariants:
    - a prompt that is too long is skipped, cut at its start (the policy continues its end), or refused;
    - a task with media is never cut;
    - the `CACHED_PROMPTS` prompts that were used last stay tokenized.
    """

    limit_key, a_row = "data.max_prompt_tokens", "the prompt at "
    skipped = "tasks are skipped: their prompts are too long"
    emptied = "every prompt exceeds", "raise it, or shorten the prompts"

    def __init__(
        self, source: TaskSource, family: ModelFamily, settings: TaskSettings = TaskSettings(), check: bool = True
    ) -> None:
        """Check the tasks if `check` is set; raise ConfigError at the first unusable task."""
        super().__init__(
            source, family, settings.system_prompt, settings.max_prompt_tokens, settings.too_long, settings.media,
            settings.access,
        )  # fmt: skip
        self._tools = tuple(settings.tools)
        self._tools_of = {name: tuple(tools) for name, tools in settings.tools_of.items()}
        self._needs, self._rules = tuple(need for need in settings.needs if need.columns), tuple(settings.rules)
        self._answered_once, self._eval_set = settings.answered_once, settings.eval_set
        self.filters, self.unmatched = tuple(settings.filters), list(settings.filters)
        """All filters, and the filters that have selected no task yet."""
        self._rendered: OrderedDict[int, Rendered] = OrderedDict()
        if check:
            self._check()

    def content(self, index: int) -> RowContent:
        task = super()._read(self._kept[index])  # the name of the evaluation set is not part of a row
        return row_content(task, whole=not self._answered_once(task))

    def _read(self, row: int) -> Task:
        task = super()._read(row)
        if not self._eval_set:
            return task
        given = task.column(EVAL_SET)
        if has_value(given) and given != self._eval_set:
            got = f"{self._source.where(row)}, whose column {EVAL_SET} is {given!r}"
            fix = f'this column is for the name of the set, {self._eval_set!r}: set columns = {{given = "{EVAL_SET}"}}'
            raise ConfigError("eval.sets", got, fix)
        return replace(task, metadata={**task.metadata, EVAL_SET: self._eval_set})

    def prompt(self, index: int) -> Rendered:
        """Return the rendered prompt of a task, tokenized once."""
        return self.rendered(index)[1]

    def rendered(self, index: int) -> tuple[Task, Rendered]:
        """Return a task and its rendered prompt; the row is read once for both."""
        row = self._kept[index]
        task = self._task(row)
        if index in self._rendered:
            self._rendered.move_to_end(index)
        else:
            self._rendered[index] = self._render(task, row, self._limit)
            if len(self._rendered) > CACHED_PROMPTS:
                self._rendered.popitem(last=False)
        return task, self._rendered[index]

    def tools(self, task: Task) -> Sequence[Tool]:
        """Return the tools that the prompt of a task of this set shows."""
        return self._tools_of.get(task.environment, self._tools) or row_tools(task.column(TOOLS))

    def faults(self, index: int) -> Iterator[str]:
        row = self._kept[index]
        task = self._task(row)
        tools = self._shown_tools(task, row)
        return prompt_faults(self.family, task.prompt, tools, self._start(task, row, tools).tokens)

    def examine(self, row: int) -> Rendered | None:
        return self._render(self._task(row), row, self._limit) if self._usable(row) else None

    def _usable(self, row: int) -> bool:
        task = self._read(row)
        if not self._fits(task, row):
            return False
        for rule in self._rules:
            if (fault := rule(task)) is not None:
                raise ConfigError(fault[0], f"{self._source.where(row)}, which {fault[1]}", fault[2])
        return True

    def _fits(self, task: Task, row: int) -> bool:
        """Return False for a task whose prompt is too long. Raises ConfigError for a bad row."""
        self.unmatched = [only for only in self.unmatched if not applies(only, task)]
        for need in self._needs:
            for column in need.columns:
                if not has_value(task.column(column)) and need.applies(task):
                    got = f"{self._source.where(row)} without a value for {column!r}, which {need.component} reads"
                    fix = f"fill the column with whole text or other plain data, or name another: columns = {{{column} = ...}}"
                    raise ConfigError("data.train", got, fix)
        if not isinstance(task.prompt, str):
            self._check_media(task.prompt, row)
        task = self._with_system_prompt(task, row)
        tools = self._shown_tools(task, row)
        if isinstance(task.prompt, tuple) and any(message.extra or message.name for message in task.prompt):
            self._start(task, row, tools)
        if self._limit is None:
            return True
        messages = (Message("", task.prompt),) if isinstance(task.prompt, str) else task.prompt
        roles = tuple(message.role for message in messages)

        def probe() -> int:
            try:
                words = "x" if roles == ("",) else tuple(Message(role, "x") for role in roles)
                return len(self.family.start(words, tools).tokens)
            except ConfigError:  # render the real prompt, whose error names the row
                return sys.maxsize

        if self._surely_fits(messages, (*roles, *(tool.name for tool in tools)), probe):
            return True
        if self._too_long == "truncate" and not media_of(messages):  # media can't be cut
            return True
        length = len(self._render(task, row, None).tokens)
        if length > self._limit and self._too_long == "error":
            raise self._too_long_error(row, length)
        return length <= self._limit

    def _render(self, task: Task, row: int, limit: int | None) -> Rendered:
        """Render the prompt of a task, cut to `limit` tokens. Raises ConfigError if a longer prompt must not be cut."""
        rendered = self._start(task, row, self._shown_tools(task, row))
        if limit is None or len(rendered.tokens) <= limit:
            return rendered
        if self._too_long == "truncate":
            return replace(rendered, tokens=rendered.tokens[-limit:])
        raise self._too_long_error(row, len(rendered.tokens))

    def _start(self, task: Task, row: int, tools: Sequence[Tool]) -> Rendered:
        with self._named(row):
            rendered = self.family.start(task.prompt, tools)
            check_placeholders(self.family, rendered, () if isinstance(task.prompt, str) else task.prompt)
        self._check_ids(rendered.tokens, row)
        return rendered

    def _shown_tools(self, task: Task, row: int) -> Sequence[Tool]:
        """Return the tools of the task's environment, or else of its row. Raises ConfigError if both have tools."""
        tools, described = self._tools_of.get(task.environment, self._tools), self._row_tools(task, row)
        if tools and described:
            got = f"{self._source.where(row)}, whose {TOOLS} would be dropped: its environment shows its own tools"
            raise ConfigError("data.train", got, NOT_SHOWN)
        return tools or described


class StoredHoldOut(NamedTuple):
    """The rows that a run held out of its training rows when it began, as its directory stores them."""

    size: int
    rows: frozenset[int] | None
    """Numbers of the rows in the task file; None: not drawn yet."""


def hold_out_size(size: int | None, count: int) -> int:
    """Return the number of tasks to hold out of `count` tasks; `size` None: a tenth, from 1 to `MOST_HELD_OUT`.

    Raises ConfigError if no task would be left to train on.
    """
    size = min(MOST_HELD_OUT, max(count // 10, 1)) if size is None else size
    if not 0 <= size < count:
        fix = "leave at least one task to train on, name [[eval.sets]], or set eval.every = 0"
        raise ConfigError("eval.size", f"{size} of {count} tasks", fix)
    return size


def draw_hold_out(rows: Sequence[int], size: int | None, seed: int) -> frozenset[int]:
    """Draw `hold_out_size` rows; equal seeds draw equal rows. Raises ConfigError if no row would be left."""
    return frozenset(random.Random(f"hold-out {seed}").sample(rows, hold_out_size(size, len(rows))))


def stored_hold_out(run_dir: Path) -> StoredHoldOut | None:
    """Read the held-out rows of a run; None if they are not stored. Raises ConfigError for a damaged file."""
    path = run_dir / HELD_OUT_FILE
    if (document := read_document(path)) is None:
        return None
    size, rows = document.get("size"), document.get("rows")
    if not isinstance(size, int) or not (rows is None or (isinstance(rows, list) and len(rows) == size)):
        raise ConfigError(str(path), "a file without the held-out rows", "restore the file from a copy of the run")
    return StoredHoldOut(size, None if rows is None else frozenset(rows))


def store_hold_out(run_dir: Path, size: int, rows: Sequence[int] | None = None) -> None:
    """Store the held-out rows of a run, or only their number if the rows are not drawn yet."""
    write_document(run_dir / HELD_OUT_FILE, "relax.held-out/1", {"size": size, "rows": rows})


def charged_to(source: TaskSource) -> AbstractContextManager[None]:
    """Return a context that raises PluginError, naming a task source, for an error of the source's code."""
    return authored(f"task-source {type(source).__qualname__}")


def read_task(source: TaskSource, row: int) -> Task:
    """Read a row of a task source. Raises PluginError, naming the source, if it fails or returns another type."""
    if isinstance(source, TaskFiles):
        return source[row]
    with charged_to(source):
        task: Task = checked(source[row], Task, f"{returned_by(source.__getitem__)}: row {row}")
    return task if isinstance(task.prompt, str | tuple) else replace(task, prompt=tuple(task.prompt))


def has_value(value: object) -> bool:
    """Return False for None and NaN, with which table libraries fill cells without a value."""
    return value is not None and not (isinstance(value, float) and value != value)


def check_placeholders(family: ModelFamily, rendered: Rendered, messages: Sequence[Message]) -> None:
    """Raise ConfigError unless the rendering has exactly one placeholder for each medium of the messages."""
    kinds = [media.kind for media in media_of(messages)]
    if family.placeholders and (fault := misplaced(rendered.tokens, kinds, family.placeholders)):
        raise ConfigError("data.train", fault.partition("; ")[0], fault.partition("; ")[2])


def task_set(
    context: RunContext, family: ModelFamily, key: str, path: str, columns: Any, found: Mapping[str, Sequence[Tool]],
    teachers: Sequence[TeacherTable] = (), evaluated: EvalSetTable | None = None,
) -> TaskSet:  # fmt: skip
    """Open the task file of a configuration key and check every task for the run's rewards, environments and teachers.

    `found`: tools by environment name, for environments that discover their tools at the start of the run. `evaluated`:
    the evaluation set of the file; None: the file of `data.train`.
    """
    source = context.build(context.config.source.chosen, TaskSource)
    try:
        with charged_to(source):
            source.open(path, columns)
    except ConfigError as error:
        raise ConfigError(key, error.got, error.fix) from error  # a source does not know which key names its file
    return TaskSet(source, family, task_settings(context.config, context.build, path, found, teachers, evaluated))


def task_settings(
    run: RunConfig, build: Callable[..., Any], path: str, found: Mapping[str, Sequence[Tool]],
    teachers: Sequence[TeacherTable] = (), evaluated: EvalSetTable | None = None,
) -> TaskSettings:  # fmt: skip
    """Return the settings of the `TaskSet` of a run's task file, for the run itself and for checks before the run.

    `teachers`: the run's teachers if the tasks of the file are taught. `evaluated`: the evaluation set of the file.
    """
    longest_turn = (evaluated and evaluated.max_new_tokens) or run.rollout.max_new_tokens
    filters = [choice.only for choice in run.rewards]
    needs = [
        ColumnNeed(
            choice.known_as, type(build(choice.chosen, Reward)).needs_columns,
            partial(applies, choice.only, others=filters),
        )
        for choice in run.rewards
    ]  # fmt: skip
    environments: dict[str, type[Environment]] = {
        choice.known_as: type(build(choice.chosen, Environment)) for choice in (run.environment, *run.environments)
    }
    for name, environment in environments.items():
        needs.append(ColumnNeed(name, environment.needs_columns, partial(_is_played, run, name)))
    tools = {name: found.get(name, environment.tools) for name, environment in environments.items()}
    main = run.environment.known_as
    once = {choice.known_as for choice in (run.environment, *run.environments) if choice.name == SINGLE_TURN}
    rules: list[Rule] = [partial(_unplayed, environments)] if run.environments else []
    if filters and all(only not in ("", OTHERWISE) for only in filters):
        rules.append(partial(_unjudged, environments, environments[main], filters))
    if any(teacher.only for teacher in teachers):
        rules.append(partial(teaching_fault, teachers))
    return TaskSettings(
        system_prompt=run.data.system_prompt,
        max_prompt_tokens=run.data.max_prompt_tokens or bounded_context(run.model.path) - longest_turn,
        too_long=run.data.too_long,
        needs=needs,
        tools=tools[main],
        tools_of=tools,
        media=[type(build(each.chosen, ModalityProcessor)).medium for each in run.media],
        access=source_access(run.data, [Path(path)]),
        rules=rules,
        filters=[only for only in (*filters, *(teacher.only for teacher in teachers)) if only not in ("", OTHERWISE)],
        answered_once=lambda task: (task.environment or main) in once,
        eval_set=evaluated.name if evaluated else "",
    )


def unmatched_filters(run: RunConfig, sets: Sequence[TaskSet]) -> Iterator[ConfigError]:
    """Yield an error for each filter `only` of a reward or teacher that selects no task of any set."""
    matched = {only for tasks in sets for only in tasks.filters if only not in tasks.unmatched}
    missed = {only for tasks in sets for only in tasks.filters} - matched
    given = [(f"rewards.{number}.only", reward.only) for number, reward in enumerate(run.rewards)]
    given += [(f"teachers.{number}.only", teacher.only) for number, teacher in enumerate(run.teachers)]
    for key, only in given:
        if only in missed:
            fix = "no task has this value in this column: correct the filter, or remove this table"
            yield ConfigError(key, repr(only), fix)


def _unplayed(environments: Mapping[str, type[Environment]], task: Task) -> tuple[str, str, str] | None:
    """Return the fault of a task that names an environment that the run does not have."""
    if not task.environment or task.environment in environments:
        return None
    fix = f"this run has {', '.join(environments)}: add it as [[environments]], or leave such tasks out of data.train"
    return "environments", f"names {task.environment!r}", fix


def _unjudged(
    environments: Mapping[str, type[Environment]], main: type[Environment], filters: Sequence[str], task: Task
) -> tuple[str, str, str] | None:
    """Return the fault of a task that no reward judges, and whose environment gives no reward."""
    if environments.get(task.environment, main).gives_reward or any(applies(only, task) for only in filters):
        return None
    fix = f'add a reward with only = "{OTHERWISE}", or leave such tasks out of the file'
    return "rewards", "no reward judges", fix


def _is_played(run: Any, environment: str, task: Task) -> bool:
    """Return True if an environment plays a task; the only environment of a run plays every task."""
    return not run.environments or (task.environment or run.environment.known_as) == environment


def applies(only: str, task: Task, others: Sequence[str] = ()) -> bool:
    """Return True if `only`, a reward's or teacher's filter, selects a task.

    The filter is empty (every task), `PATH=VALUE` with a dotted path into the task's columns and the value as text, or
    `otherwise`, which selects the tasks that no filter in `others` selects.
    """
    if not only:
        return True
    if only == OTHERWISE:
        return not any(applies(other, task) for other in others if other not in ("", OTHERWISE))
    path, _, wanted = only.partition("=")
    first, *keys = path.strip().split(".")
    value: Any = task.column(first)
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value is not None and str(value) == wanted.strip()


def teachers_of(task: Task, teachers: Sequence[TeacherTable]) -> list[int]:
    """Return the indices of the teachers that teach a task."""
    return [number for number, teacher in enumerate(teachers) if applies(teacher.only, task)]


def teaching_fault(teachers: Sequence[TeacherTable], task: Task) -> tuple[str, str, str] | None:
    """Return the fault of a task that does not have exactly one teacher."""
    numbers = teachers_of(task, teachers)
    if not numbers:
        fix = "widen the filter `only` of a teacher, or leave such tasks out of data.train"
        return "teachers", "no teacher teaches", fix
    if len(numbers) == 1:
        return None
    which = " and ".join(f"teachers.{number} ({teachers[number].only})" for number in numbers)
    return "teachers", f"{which} teach", "make their filters disjoint"
