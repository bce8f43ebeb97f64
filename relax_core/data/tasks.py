# SPDX-License-Identifier: Apache-2.0
"""The tasks of a run: a source's rows with the system prompt put before them, checked once, tokenized once.

It decides what may be issued; in which order is the sampler's, and what a row means is the source's.
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from relax_core.api.environment import Environment, Tool
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.modality import ModalityProcessor
from relax_core.api.reward import Reward
from relax_core.api.source import TaskSource
from relax_core.api.task import Message, Task
from relax_core.config.model_folder import bounded_context
from relax_core.config.run_config import RunContext
from relax_core.config.tables import TeacherTable
from relax_core.data.placeholders import media_of, misplaced
from relax_core.data.task_files import source_access
from relax_core.media.access import SourceAccess
from relax_core.media.source import check_source, is_path, shown

HOLD_OUT = "held-out"
OTHERWISE = "otherwise"
"""The name of the evaluation set that is held out of the training tasks."""
TOO_LONG = ("skip", "truncate", "error")
CACHED_PROMPTS = 4096  # a group's samples and the groups in flight share a prompt; a whole epoch need not stay
PROBE_SLACK = 8  # tokens by which a tokenizer may differ at the seams between template and words


@dataclass(frozen=True, slots=True)
class ColumnNeed:
    """Columns that one component reads of the tasks that it sees."""

    component: str
    columns: tuple[str, ...]
    applies: Callable[[Task], bool] = lambda task: True
    """Tells whether the component sees a task at all: a reward may judge only some."""


class RowSet(ABC):
    """Rows of a task source that may be issued, by number; the sampler decides in which order.

    Invariants:
    - every row is read once when the set is opened, and was usable then; `num_skipped` counts those that are too long;
    - a row stands for itself: its text is made when it is asked for.
    """

    limit_key: ClassVar[str]
    """The key of the bound of tokens."""
    a_row: ClassVar[str] = ""
    """Words before the place of a row that is too long."""
    skipped: ClassVar[str]
    """Words for rows that are skipped, with the reason."""
    emptied: ClassVar[tuple[str, str]]
    """Why nothing may be left within that bound, and the way out."""

    def __init__(
        self, source: TaskSource, family: ModelFamily, system_prompt: str, limit: int | None, too_long: str,
        media: Sequence[str], access: SourceAccess,
    ) -> None:  # fmt: skip
        """`source` and `family` are open; `media`: kinds that the run has processors for; `access`: what they may name."""
        if too_long not in TOO_LONG:
            raise ConfigError("data.too_long", repr(too_long), f"choose {', '.join(TOO_LONG)}")
        self.family = family
        self._source, self._system_prompt, self._limit, self._too_long = source, system_prompt, limit, too_long
        self._media, self._access = frozenset(media), access
        self._overheads: dict[Hashable, int] = {}
        self._kept = array("q", range(len(source)))
        self.num_skipped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Task:
        return self._task(self._kept[index])

    def where(self, index: int) -> str:
        """`file:line` of a row."""
        return self._source.where(self._kept[index])

    def hold_out(self, size: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Draw `size` rows: (train, eval) numbers, each in order; the same for the same seed and rows."""
        count = len(self)
        if not 0 < size < count:
            raise ConfigError("eval.size", f"{size} of {count} tasks", "leave at least one task to train on")
        held = frozenset(random.Random(f"hold-out {seed}").sample(range(count), size))
        return tuple(index for index in range(count) if index not in held), tuple(sorted(held))

    def remarks(self, train: Sequence[int]) -> list[str]:
        """Say how the rows are used, for people; `train`: those that are issued."""
        said = [f"{self.num_skipped} {self.skipped}"] if self.num_skipped else []
        if held := len(self) - len(train):
            rows = self.skipped.split()[0]
            said.append(f"{held} of {len(self)} {rows} are held out for evaluation; name [[eval.sets]] to use others")
        return said

    @abstractmethod
    def examine(self, row: int) -> Rendered | None:
        """Check and render a row of the source; None where it is skipped. Raises ConfigError for a bad one."""

    @abstractmethod
    def _usable(self, row: int) -> bool:
        """False where it is skipped; raises where it must not be."""

    def _check(self) -> None:
        """Read every row once, and keep those that are usable."""
        kept = array("q", (row for row in range(len(self._source)) if self._usable(row)))
        self.num_skipped = len(self._kept) - len(kept)
        self._kept = kept
        if not kept:
            raise ConfigError(self.limit_key, f"{self._limit}, which {self.emptied[0]}", self.emptied[1])

    def _task(self, row: int) -> Task:
        """Read a row, with the system prompt before its own messages; a row's own system message stays instead."""
        return self._with_system_prompt(self._source[row], row)

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

    def _check_media(self, messages: Sequence[Message], row: int) -> None:
        """Raise ConfigError unless the media of a row are of kinds that the run reads, allowed, and, where they are files,
        there."""
        for media in media_of(messages):
            where = f"{media.kind} {shown(media.source)} at {self._source.where(row)}"
            if media.kind not in self._media:
                fix = f'no processor here reads it: write media = ["{media.kind}"], or leave such rows out'
                raise ConfigError("media", where, fix)
            if media.kind not in self.family.placeholders:
                raise ConfigError("model.path", where, f"the model's config.json has no {media.kind}_token_id")
            try:
                check_source(media.source, self._access)
            except ConfigError as refused:
                got = f"{media.kind} {refused.got} at {self._source.where(row)}"
                raise ConfigError(refused.field, got, refused.fix) from refused
            if is_path(media.source) and not Path(media.source).is_file():
                raise ConfigError("data.train", where, "there is no such file; paths are relative to the task file")

    def _surely_fits(self, messages: Sequence[Message], form: Hashable, probe: Callable[[], int]) -> bool:
        """Tell whether characters alone say that a text fits, which spares most tokenizing: a token of ASCII has one or more.

        `probe` counts the tokens of the template around words of this form; it is called once for each.
        """
        if any(m.tool_calls or not isinstance(m.content, str) or not m.content.isascii() for m in messages):
            return False
        if form not in self._overheads:
            self._overheads[form] = probe()
        return sum(len(m.text) for m in messages) + self._overheads[form] + PROBE_SLACK <= (self._limit or 0)

    def _too_long_error(self, row: int, length: int) -> ConfigError:
        got = f"{self._limit}, but {self.a_row}{self._source.where(row)} has {length} tokens"
        return ConfigError(self.limit_key, got, 'raise it, or set data.too_long = "skip" or "truncate"')

    @contextmanager
    def _named(self, row: int) -> Iterator[None]:
        """Name the row in errors of its rendering."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(error.field, f"{error.got} at {self._source.where(row)}", error.fix) from error


class TaskSet(RowSet):
    """Tasks for a rollout, each with its rendered prompt.

    Invariants:
    - a prompt that is too long is skipped, cut at its beginning (the policy speaks at its end), or refused, never issued;
    - a task with media is never cut;
    - the ids of a prompt are made once while they are among the last `CACHED_PROMPTS`.
    """

    limit_key, a_row = "data.max_prompt_tokens", "the prompt at "
    skipped = "tasks are skipped: their prompts are too long"
    emptied = "every prompt exceeds", "raise it, or shorten the prompts"

    def __init__(
        self, source: TaskSource, family: ModelFamily, *, system_prompt: str = "", max_prompt_tokens: int | None = None,
        too_long: str = "skip", needs: Sequence[ColumnNeed] = (), tools: Sequence[Tool] = (),
        tools_of: Mapping[str, Sequence[Tool]] | None = None, media: Sequence[str] = (), check: bool = True,
        access: SourceAccess | None = None,
    ) -> None:  # fmt: skip
        """`tools_of`: of tasks that name an environment. Raises ConfigError at the first task that can't be used, unless not
        `check`."""
        super().__init__(source, family, system_prompt, max_prompt_tokens, too_long, media, access or SourceAccess())
        self._tools, self._tools_of = tuple(tools), {name: tuple(own) for name, own in (tools_of or {}).items()}
        self._needs = tuple(need for need in needs if need.columns)
        self._rendered: OrderedDict[int, Rendered] = OrderedDict()
        if check and (self._needs or system_prompt or self._media or (max_prompt_tokens and too_long != "truncate")):
            self._check()

    def prompt(self, index: int) -> Rendered:
        """The prompt's ids, tokenized once."""
        return self.rendered(index)[1]

    def rendered(self, index: int) -> tuple[Task, Rendered]:
        """A task and its prompt's ids; the task is read once for both."""
        row = self._kept[index]
        task = self._task(row)
        if index in self._rendered:
            self._rendered.move_to_end(index)
        else:
            self._rendered[index] = self._render(task, row, self._limit)
            if len(self._rendered) > CACHED_PROMPTS:
                self._rendered.popitem(last=False)
        return task, self._rendered[index]

    def examine(self, row: int) -> Rendered | None:
        return self._render(self._task(row), row, self._limit) if self._usable(row) else None

    def _usable(self, row: int) -> bool:
        task = self._source[row]
        for need in self._needs:
            for column in need.columns:
                if task.column(column) is None and need.applies(task):
                    got = f"{self._source.where(row)} without a value for {column!r}, which {need.component} reads"
                    fix = f"fill the column, or point to another one: columns = {{{column} = ...}}"
                    raise ConfigError("data.train", got, fix)
        if not isinstance(task.prompt, str):
            self._check_media(task.prompt, row)
        task = self._with_system_prompt(task, row)
        if self._limit is None:
            return True
        messages = (Message("", task.prompt),) if isinstance(task.prompt, str) else task.prompt
        tools = self._tools_of.get(task.environment, self._tools)
        roles = tuple(message.role for message in messages)

        def probe() -> int:
            try:
                words = "x" if roles == ("",) else tuple(Message(role, "x") for role in roles)
                return len(self.family.start(words, tools).tokens)
            except ConfigError:  # rendering the real one decides, and names the row
                return sys.maxsize

        if self._surely_fits(messages, (*roles, *(tool.name for tool in tools)), probe):
            return True
        if self._too_long == "truncate" and not media_of(messages):  # of media there is no half
            return True
        length = len(self._render(task, row, None).tokens)
        if length > self._limit and self._too_long == "error":
            raise self._too_long_error(row, length)
        return length <= self._limit

    def _render(self, task: Task, row: int, limit: int | None) -> Rendered:
        """Make the ids of a prompt, at most `limit` of them."""
        with self._named(row):
            rendered = self.family.start(task.prompt, self._tools_of.get(task.environment, self._tools))
            check_placeholders(self.family, rendered, () if isinstance(task.prompt, str) else task.prompt)
        if limit is None or len(rendered.tokens) <= limit:
            return rendered
        if self._too_long == "truncate":
            return replace(rendered, tokens=rendered.tokens[-limit:])
        raise self._too_long_error(row, len(rendered.tokens))


def check_placeholders(family: ModelFamily, rendered: Rendered, messages: Sequence[Message]) -> None:
    """Raise ConfigError unless each medium of the messages has its one placeholder in their rendering."""
    kinds = [media.kind for media in media_of(messages)]
    if family.placeholders and (fault := misplaced(rendered.tokens, kinds, family.placeholders)):
        raise ConfigError("data.train", fault.partition("; ")[0], fault.partition("; ")[2])


def task_set(
    context: RunContext, family: ModelFamily, key: str, path: str, columns: Any, found: Mapping[str, Sequence[Tool]]
) -> TaskSet:
    """The task file of a key, under the settings of `[data]`, checked for what rewards and environment read.

    `found`: tools of the environments that find them, by name."""
    run = context.config
    needs = [
        ColumnNeed(
            choice.known_as, type(context.build(choice.chosen, Reward)).needs_columns,
            partial(applies, choice.only, others=tuple(other.only for other in run.rewards)),
        )
        for choice in run.rewards
    ]  # fmt: skip
    environments: dict[str, type[Environment]] = {
        choice.known_as: type(context.build(choice.chosen, Environment))
        for choice in (run.environment, *run.environments)
    }
    for name, environment in environments.items():
        needs.append(ColumnNeed(name, environment.needs_columns, partial(_is_played, run, name)))
    source = context.build(run.source.chosen, TaskSource)
    try:
        source.open(path, columns)
    except ConfigError as error:
        raise ConfigError(key, error.got, error.fix) from error  # a source does not know which key names its file
    tools = {name: found.get(name, environment.tools) for name, environment in environments.items()}
    limit = run.data.max_prompt_tokens or bounded_context(run.model.path) - run.rollout.max_new_tokens
    tasks = TaskSet(
        source, family, system_prompt=run.data.system_prompt, max_prompt_tokens=limit, too_long=run.data.too_long,
        needs=needs, tools=tools[run.environment.known_as], tools_of=tools,
        media=[type(context.build(each.chosen, ModalityProcessor)).medium for each in run.media],
        access=source_access(run.data, [Path(path)]),
    )  # fmt: skip
    for index in range(len(tasks)) if run.environments else ():  # a run of one environment plays all
        if (name := tasks[index].environment) and name not in environments:
            names = ", ".join(environments)
            fix = f"this run has {names}: add it as [[environments]], or leave such tasks out of data.train"
            raise ConfigError("environments", f"{tasks.where(index)}, which names {name!r}", fix)
    some = [choice.only for choice in run.rewards]
    if some and all(only not in ("", OTHERWISE) for only in some):
        for index in range(len(tasks)):
            task = tasks[index]
            played = environments.get(task.environment, environments[run.environment.known_as])
            if not played.gives_reward and not any(applies(only, task) for only in some):
                fix = f'add one with only = "{OTHERWISE}", or leave such tasks out of the file'
                raise ConfigError("rewards", f"{tasks.where(index)}, which none of them judges", fix)
    return tasks


def _is_played(run: Any, environment: str, task: Task) -> bool:
    """Tell whether an environment plays a task; where a run has one alone, it plays those of all names."""
    return not run.environments or (task.environment or run.environment.known_as) == environment


def applies(only: str, task: Task, others: Sequence[str] = ()) -> bool:
    """Tell whether a reward's `only` selects a task: a dotted path into its columns, `=`, the value as text; or `otherwise`,
    which selects those that none of `others` names."""
    if not only:
        return True
    if only == OTHERWISE:
        return not any(applies(other, task) for other in others if other not in ("", OTHERWISE))
    path, _, wanted = only.partition("=")
    first, *keys = path.strip().split(".")
    found: Any = task.column(first)
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found is not None and str(found) == wanted.strip()


def teachers_of(task: Task, teachers: Sequence[TeacherTable]) -> list[int]:
    """Numbers of the teachers that teach a task."""
    return [number for number, teacher in enumerate(teachers) if applies(teacher.only, task)]


def check_taught(tasks: TaskSet, train: Sequence[int], teachers: Sequence[TeacherTable]) -> None:
    """Raises ConfigError for the first task that no teacher teaches, or more than one does."""
    if not any(teacher.only for teacher in teachers):
        return
    for index in train:
        found = teachers_of(tasks[index], teachers)
        if not found:
            fix = "give one of them its kind as well, or leave such tasks out of data.train"
            raise ConfigError("teachers", f"{tasks.where(index)}, which none of them teaches", fix)
        if len(found) > 1:
            which = " and ".join(f"teachers.{number} ({teachers[number].only})" for number in found)
            raise ConfigError("teachers", f"{tasks.where(index)}, which {which} teach", "give them disjoint tasks")
