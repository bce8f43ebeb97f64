# SPDX-License-Identifier: Apache-2.0
"""Instruction following as IFEval and IFBench judge it: checks that a program can make, named by each task.

A task whose instruction is unknown, or lacks an argument, can't be judged: it raises, and never scores. The checks stand in
`instruction_checks.py`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import ValidationError

from relax_core.api import Options, Outcome, Reward, Score, Task, Trajectory
from relax_plugin_rewards.answers import Think, after_thinking
from relax_plugin_rewards.instruction_checks import CHECKS, Check

_FIX = 'each instruction is {"name": "length_constraints:number_words", "arguments": {"num_words": 50, "relation": "at least"}}'


class InstructionsOptions(Options):
    """Options of `instructions`."""

    column: str = "instructions"
    """Column with the instructions: a list of `{name, arguments}`, or a text of one in JSON. Where a task lacks it, the
    columns of IFEval count, `instruction_id_list` and `kwargs`."""
    mode: Literal["all", "share"] = "all"
    """`all`: 1 when every instruction is followed; `share`: the share that is."""
    loose: bool = False
    """Also accept an instruction that is followed without the response's first line, its last line, both, or its asterisks."""
    think: Think = "optional"
    """`optional`: what follows the last `</think>` counts, and everything where nothing was thought; `required`: there
    must be one; `ignored`: everything counts."""
    truncated: bool = False
    """Judge a response that a limit cut off; otherwise it scores 0: finishing is part of the task."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a task, its arguments checked."""

    check: Check
    arguments: Mapping[str, Any]

    def is_followed(self, response: str) -> bool:
        return bool(response.strip()) and self.check(response, **self.arguments)


class Instructions(Reward[InstructionsOptions]):
    """Gives from 0 to 1 for following a task's instructions; an empty response follows none."""

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
    """Read a task's instructions. Raises ValueError, which names task and instruction, for one that can't be judged."""
    rows: Any = task.column(column)
    if rows is None and task.column("instruction_id_list") is not None:
        rows = {"instruction_id_list": task.column("instruction_id_list"), "kwargs": task.column("kwargs")}
    if isinstance(rows, str):
        rows = _written(task, column, rows)
    found = tuple(_read(task, name, arguments) for name, arguments in _named(task, column, rows))
    if not found:
        raise ValueError(f"task {task.id} has no instructions in column {column!r}; {_FIX}")
    return found


def loosened(response: str) -> tuple[str, ...]:
    """Return the response without the frame that chat puts around an answer, in each combination, itself first."""
    lines = response.split("\n")
    texts = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return tuple(dict.fromkeys([response, *texts, *(text.replace("*", "") for text in texts)]))


@lru_cache(maxsize=1)
def names() -> Mapping[str, str]:
    """Return the full name of each check by its full and its short name."""
    return {**{name.rpartition(":")[2]: name for name in CHECKS}, **{name: name for name in CHECKS}}


def _written(task: Task, column: str, text: str) -> Any:
    """Read instructions that stand in a text: JSON, or Python as in the training set of IFBench."""
    for reader in (json.loads, ast.literal_eval):
        try:
            return reader(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise ValueError(f"task {task.id}: column {column!r} is {text[:100]!r}, which can't be read; {_FIX}")


def _named(task: Task, column: str, rows: Any) -> Iterator[tuple[Any, Any]]:
    """Yield names and arguments from any of the layouts that data sets have."""
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
        raise ValueError(f"task {task.id}: no check is named {name!r}; there are {', '.join(sorted(CHECKS))}")
    if isinstance(arguments, str):
        arguments = _written(task, str(name), arguments)
    if not isinstance(arguments, (Mapping, type(None))):
        raise ValueError(f"task {task.id}: instruction {name} has arguments {str(arguments)[:100]!r}; {_FIX}")
    check, model = CHECKS[full]
    given = {
        key: value for key, value in (arguments or {}).items() if value is not None
    }  # tables fill rows up with nulls
    try:
        valid = model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "arguments"
        raise ValueError(f"task {task.id}: instruction {name}: {where}: {first['msg']}; correct its row") from None
    return Instruction(check, {field: getattr(valid, field) for field in model.model_fields})
