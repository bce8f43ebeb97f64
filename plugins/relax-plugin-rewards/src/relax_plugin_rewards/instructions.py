# SPDX-License-Identifier: Apache-2.0
"""The reward `instructions`, as in IFEval and IFBench: runs the checks that a task names on the response.

A task with an unknown instruction or a missing argument raises an error, so its samples get no score. The checks are
defined in `instruction_checks.py`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import ValidationError

from relax_core.api import Gold, Options, Outcome, Reward, Score, Task, Trajectory
from relax_plugin_rewards.answers import Think, after_thinking
from relax_plugin_rewards.instruction_checks import CHECKS, Check

_FIX = 'each instruction is {"name": "length_constraints:number_words", "arguments": {"num_words": 50, "relation": "at least"}}'


class InstructionsOptions(Options):
    """Options of `instructions`."""

    column: str = "instructions"
    """Name of the column with the instructions: a list of `{name, arguments}`, or this list as JSON text. For a task
    without the column, IFEval's columns `instruction_id_list` and `kwargs` are read."""
    mode: Literal["all", "share"] = "all"
    """`all`: 1 if every instruction is followed, else 0; `share`: the share of instructions that are followed."""
    loose: bool = False
    """Also accept an instruction that is followed after removing the first line, the last line or both, or all
    asterisks."""
    think: Think = "optional"
    """Judged part of a response. `optional`: the text after the last `</think>`, or all if it has no `</think>`;
    `required`: the same, but a response without `</think>` has no answer; `ignored`: the whole response."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a task: a check with validated arguments."""

    check: Check
    arguments: Mapping[str, Any]

    def is_followed(self, response: str) -> bool:
        return bool(response.strip()) and self.check(response, **self.arguments)


class Instructions(Reward[InstructionsOptions]):
    """A reward from 0 to 1 for following the task's instructions; an empty response scores 0."""

    def gold(self, task: Task) -> Gold:
        instructions = instructions_of(task, self.options.column)
        return Gold("the instructions " + ", ".join(one.check.__name__ for one in instructions), ())

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        instructions = instructions_of(task, self.options.column)
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return Score(0.0, {"followed": 0.0})
        response = after_thinking(trajectory.response, self.options.think)
        variants = loosened(response) if self.options.loose else (response,)
        followed = sum(any(map(one.is_followed, variants)) for one in instructions)
        share = followed / len(instructions)
        return Score(share if self.options.mode == "share" else float(share == 1.0), {"followed": share})


def instructions_of(task: Task, column: str) -> tuple[Instruction, ...]:
    """Return a task's instructions. Raises ValueError naming the task and an instruction that can't be checked."""
    rows: Any = task.column(column)
    if rows is None and task.column("instruction_id_list") is not None:
        rows = {"instruction_id_list": task.column("instruction_id_list"), "kwargs": task.column("kwargs")}
    if isinstance(rows, str):
        rows = _written(task, column, rows)
    found = tuple(_read(task, name, arguments) for name, arguments in _named(task, column, rows))
    if not found:
        raise ValueError(f"task {task.id} has no instructions in column {column!r}; add some: {_FIX}")
    return found


def loosened(response: str) -> tuple[str, ...]:
    """Return the response, then without first line, last line or both, then all four without asterisks."""
    lines = response.split("\n")
    texts = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return tuple(dict.fromkeys([response, *texts, *(text.replace("*", "") for text in texts)]))


@lru_cache(maxsize=1)
def names() -> Mapping[str, str]:
    """Return each check's full name, by the full name and by the part after the colon."""
    return {**{name.rpartition(":")[2]: name for name in CHECKS}, **{name: name for name in CHECKS}}


def _written(task: Task, column: str, text: str) -> Any:
    """Parse instructions from text: JSON, or a Python literal as in IFBench's training set. Raises ValueError."""
    for reader in (json.loads, ast.literal_eval):
        try:
            return reader(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise ValueError(f"task {task.id}: column {column!r} is {text[:100]!r}, which can't be read; {_FIX}")


def _named(task: Task, column: str, rows: Any) -> Iterator[tuple[Any, Any]]:
    """Yield name and arguments of each instruction, from any of the layouts that data sets use."""
    for row in [rows] if isinstance(rows, Mapping) else rows if isinstance(rows, (list, tuple)) else ():
        if not isinstance(row, Mapping):
            raise ValueError(f"task {task.id}: column {column!r} has {str(row)[:100]!r}; {_FIX}")
        name = next((row[key] for key in ("name", "instruction_id_list", "instruction_id") if key in row), None)
        arguments = row.get("arguments", row.get("kwargs"))
        if isinstance(name, (list, tuple)):
            every = arguments if isinstance(arguments, (list, tuple)) else [arguments] * len(name)
            if len(every) != len(name):
                raise ValueError(
                    f"task {task.id}: {len(name)} instructions have {len(every)} sets of arguments; {_FIX}"
                )
            yield from zip(name, every, strict=True)
        else:
            yield name, arguments


def _read(task: Task, name: Any, arguments: Any) -> Instruction:
    full = names().get(str(name))
    if full is None:
        raise ValueError(f"task {task.id}: no check is named {name!r}; use one of {', '.join(sorted(CHECKS))}")
    if isinstance(arguments, str):
        arguments = _written(task, str(name), arguments)
    if not isinstance(arguments, (Mapping, type(None))):
        raise ValueError(f"task {task.id}: instruction {name} has arguments {str(arguments)[:100]!r}; {_FIX}")
    check, model = CHECKS[full]
    given = {
        key: value for key, value in (arguments or {}).items() if value is not None
    }  # table formats fill missing fields with nulls
    try:
        valid = model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "arguments"
        raise ValueError(f"task {task.id}: instruction {name}: {where}: {first['msg']}; correct its row") from None
    return Instruction(check, {field: getattr(valid, field) for field in model.model_fields})
