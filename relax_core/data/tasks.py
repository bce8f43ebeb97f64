# SPDX-License-Identifier: Apache-2.0
"""The tasks of a run: a source's rows with the system prompt put before them, checked once, tokenized once.

It decides what may be issued; in which order is the sampler's, and what a row means is the source's.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from relax_core.api.environment import Environment, Tool
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.source import TaskSource
from relax_core.api.task import Message, Task
from relax_core.config.run_config import RunContext
from relax_core.config.tables import TeacherTable
from relax_core.data.media_pipeline import context_of, media_of
from relax_core.data.placeholders import misplaced
from relax_core.media.source import shown

HOLD_OUT = "held-out"
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
    """Whether it sees a task at all: a reward may judge only some."""


class TaskSet:
    """Usable tasks by number, each with its rendered prompt.

    Invariants:
    - a prompt that is too long is skipped, cut at its beginning (the policy speaks at its end), or refused, never issued;
    - a task with media is never cut;
    - the ids of a prompt are made once while they are among the last `CACHED_PROMPTS`.
    """

    def __init__(
        self,
        source: TaskSource,
        family: ModelFamily,
        *,
        system_prompt: str = "",
        max_prompt_tokens: int | None = None,
        too_long: str = "skip",
        needs: Sequence[ColumnNeed] = (),
        tools: Sequence[Tool] = (),
        tools_of: Mapping[str, Sequence[Tool]] | None = None,
        media: Sequence[str] = (),
        check: bool = True,
    ) -> None:
        """`source` and `family` are open; `tools_of`: of tasks that name an environment; `media`: kinds that the run has
        processors for.

        Raises ConfigError at the first task that can't be used, unless not `check`.
        """
        if too_long not in TOO_LONG:
            raise ConfigError("data.too_long", repr(too_long), f"choose {', '.join(TOO_LONG)}")
        self._source, self._family, self._tools = source, family, tuple(tools)
        self._tools_of = {name: tuple(own) for name, own in (tools_of or {}).items()}
        self._system_prompt, self._limit, self._too_long = system_prompt, max_prompt_tokens, too_long
        self._media = frozenset(media)
        self._needs = tuple(need for need in needs if need.columns)
        self._rendered: OrderedDict[int, Rendered] = OrderedDict()
        self._overheads: dict[tuple[str, ...], int] = {}
        self._kept = array("q", range(len(source)))
        self.num_skipped = 0
        if check and (self._needs or system_prompt or self._media or (max_prompt_tokens and too_long != "truncate")):
            self._check()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Task:
        return self._prompted(self._source[self._kept[index]], self._kept[index])

    def where(self, index: int) -> str:
        """`file:line` of a task."""
        return self._source.where(self._kept[index])

    def prompt(self, index: int) -> Rendered:
        """The prompt's ids, tokenized once."""
        return self.rendered(index)[1]

    def rendered(self, index: int) -> tuple[Task, Rendered]:
        """A task and its prompt's ids; the task is read once for both."""
        task = self[index]
        if index in self._rendered:
            self._rendered.move_to_end(index)
        else:
            row = self._kept[index]
            self._rendered[index] = self._fitted(self._render(task, row), row)
            if len(self._rendered) > CACHED_PROMPTS:
                self._rendered.popitem(last=False)
        return task, self._rendered[index]

    def hold_out(self, size: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(train, eval) indices in order of the file; the same for the same seed and tasks."""
        return hold_out(len(self), size, seed)

    def examine(self, row: int) -> Rendered | None:
        """A row of the source, checked and rendered; None where it is skipped. Raises ConfigError for a bad one."""
        if not self._usable(row):
            return None
        return self._fitted(self._render(self._prompted(self._source[row], row), row), row)

    def _check(self) -> None:
        """Read every row once: columns that rewards need, prompts that can't carry what is asked, lengths."""
        kept = array("q", (row for row in range(len(self._source)) if self._usable(row)))
        self.num_skipped = len(self._kept) - len(kept)
        self._kept = kept
        if not kept:
            got = f"{self._limit}, which every prompt exceeds"
            raise ConfigError("data.max_prompt_tokens", got, "raise it, or shorten the prompts")

    def _usable(self, row: int) -> bool:
        """False where it is skipped; raises where it must not be."""
        task = self._source[row]
        for need in self._needs:
            for column in need.columns:
                if task.column(column) is None and need.applies(task):
                    got = f"{self._source.where(row)} without a value for {column!r}, which {need.component} reads"
                    fix = f"fill the column, or point to another one: columns = {{{column} = ...}}"
                    raise ConfigError("data.train", got, fix)
        if not isinstance(task.prompt, str):
            self.look(task.prompt, row)
        return self._fits(self._prompted(task, row), row)

    def look(self, messages: Sequence[Message], row: int) -> None:
        """Raise ConfigError unless the media of a row are of kinds that the run reads, and are there where they are files."""
        for media in media_of(messages):
            where = f"{media.kind} {shown(media.source)} at {self._source.where(row)}"
            if media.kind not in self._media:
                fix = f'no processor here reads it: write media = ["{media.kind}"], or leave such rows out'
                raise ConfigError("media", where, fix)
            if media.kind not in self._family.placeholders:
                raise ConfigError("model.path", where, f"the model's config.json has no {media.kind}_token_id")
            if ":" not in media.source and not Path(media.source).is_file():
                raise ConfigError("data.train", where, "there is no such file; paths are relative to the task file")

    def _prompted(self, task: Task, row: int) -> Task:
        """Put the system prompt before a task; a row's own system message stays instead."""
        if not self._system_prompt:
            return task
        if isinstance(task.prompt, str):
            got = f"{self._source.where(row)}, whose prompt is a bare string that goes to the model as it stands"
            fix = 'write the prompt as messages, [{"role": "user", "content": ...}], or leave the system prompt out'
            raise ConfigError("data.system_prompt", got, fix)
        if any(message.role == "system" for message in task.prompt):
            return task
        return replace(task, prompt=(Message("system", self._system_prompt), *task.prompt))

    def _fits(self, task: Task, row: int) -> bool:
        messages = (Message("", task.prompt),) if isinstance(task.prompt, str) else task.prompt
        limit = self._limit
        if limit is None or surely_fits(messages, lambda: self._overhead(messages, self._tools_for(task)), limit):
            return True
        shows = not isinstance(task.prompt, str) and bool(media_of(task.prompt))
        if self._too_long == "truncate" and not shows:  # of media there is no half
            return True
        length = len(self._render(task, row).tokens)
        if length > limit and self._too_long == "error":
            raise self._too_long_error(row, length)
        return length <= limit

    def _tools_for(self, task: Task) -> tuple[Tool, ...]:
        return self._tools_of.get(task.environment, self._tools)

    def _overhead(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> int:
        """Tokens of the template around words under these roles; unbounded where it refuses the probe."""
        roles = tuple(message.role for message in messages)
        known = (*roles, *(tool.name for tool in tools))
        if known not in self._overheads:
            probe = "x" if roles == ("",) else tuple(Message(role, "x") for role in roles)
            try:
                self._overheads[known] = len(self._family.start(probe, tools).tokens)
            except ConfigError:  # rendering the real one decides, and names the row
                self._overheads[known] = sys.maxsize
        return self._overheads[known]

    def _render(self, task: Task, row: int) -> Rendered:
        try:
            rendered = self._family.start(task.prompt, self._tools_for(task))
            check_placeholders(self._family, rendered, () if isinstance(task.prompt, str) else task.prompt)
            return rendered
        except ConfigError as error:
            raise ConfigError(error.field, f"{error.got} at {self._source.where(row)}", error.fix) from error

    def _fitted(self, rendered: Rendered, row: int) -> Rendered:
        if self._limit is None or len(rendered.tokens) <= self._limit:
            return rendered
        if self._too_long == "truncate":
            return replace(rendered, tokens=rendered.tokens[-self._limit :])
        raise self._too_long_error(row, len(rendered.tokens))

    def _too_long_error(self, row: int, length: int) -> ConfigError:
        got = f"{self._limit}, but the prompt at {self._source.where(row)} has {length} tokens"
        return ConfigError("data.max_prompt_tokens", got, 'raise it, or set data.too_long = "skip" or "truncate"')


def surely_fits(messages: Sequence[Message], overhead: Callable[[], int], limit: int) -> bool:
    """Whether characters alone say that a text fits, which spares most tokenizing: a token of ASCII has one or more."""
    if any(m.tool_calls or not isinstance(m.content, str) or not m.content.isascii() for m in messages):
        return False
    return sum(len(m.text) for m in messages) + overhead() + PROBE_SLACK <= limit


def check_placeholders(family: ModelFamily, rendered: Rendered, messages: Sequence[Message]) -> None:
    """Raise ConfigError unless each medium of the messages has its one placeholder in their rendering."""
    kinds = [media.kind for media in media_of(messages)]
    if family.placeholders and (fault := misplaced(rendered.tokens, kinds, family.placeholders)):
        raise ConfigError("data.train", fault.partition("; ")[0], fault.partition("; ")[2])


def task_set(context: RunContext, family: ModelFamily, key: str, path: str, columns: Any) -> TaskSet:
    """The task file of a key, under the settings of `[data]`, checked for what rewards and environment read."""
    run = context.config
    needs = [
        ColumnNeed(choice.name, type(context.build(choice.chosen)).needs_columns, partial(applies, choice.only))
        for choice in run.rewards
    ]
    environments: dict[str, type[Environment]] = {
        choice.name: type(context.build(choice.chosen)) for choice in (run.environment, *run.environments)
    }
    for name, environment in environments.items():
        needs.append(ColumnNeed(name, environment.needs_columns, partial(_is_played, run, name)))
    source = context.build(run.source.chosen)
    try:
        source.open(path, columns)
    except ConfigError as error:
        raise ConfigError(key, error.got, error.fix) from error  # a source does not know which key names its file
    limit = run.data.max_prompt_tokens or context_of(run) - run.rollout.max_new_tokens
    tasks = TaskSet(
        source, family, system_prompt=run.data.system_prompt, max_prompt_tokens=limit, too_long=run.data.too_long,
        needs=needs, tools=environments[run.environment.name].tools,
        tools_of={name: environment.tools for name, environment in environments.items()},
        media=[type(context.build(each.chosen)).medium for each in run.media],
    )  # fmt: skip
    if run.environments:
        check_known(tasks, list(environments))
    return tasks


def check_known(tasks: TaskSet, names: Sequence[str]) -> None:
    """Raises ConfigError for the first task whose environment the run does not have. A run of one environment plays all."""
    for index in range(len(tasks)):
        if (name := tasks[index].environment) and name not in names:
            fix = f"this run has {', '.join(names)}: add it as [[environments]], or leave such tasks out of data.train"
            raise ConfigError("environments", f"{tasks.where(index)}, which names {name!r}", fix)


def _is_played(run: Any, environment: str, task: Task) -> bool:
    """Whether an environment plays a task; where a run has one alone, it plays those of all names."""
    return not run.environments or (task.environment or run.environment.name) == environment


def hold_out(count: int, size: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw `size` of `count` indices: (train, eval), each in order."""
    if not 0 < size < count:
        raise ConfigError("eval.size", f"{size} of {count} tasks", "leave at least one task to train on")
    held = frozenset(random.Random(f"hold-out {seed}").sample(range(count), size))
    return tuple(index for index in range(count) if index not in held), tuple(sorted(held))


def applies(only: str, task: Task) -> bool:
    """Whether a reward's `only` selects a task: a dotted path into its columns, `=`, the value as text."""
    if not only:
        return True
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
