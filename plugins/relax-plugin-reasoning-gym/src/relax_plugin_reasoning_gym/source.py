# SPDX-License-Identifier: Apache-2.0
"""The task source `reasoning-gym`: tasks that are made when they are asked for, from a tasks file (`NAME.gym`).

No task is stored. Each is a function of the file, so a resumed run goes on at the same one, and the reward makes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar

from relax_core.api import ConfigError, Message, Options, Task, TaskSource
from relax_plugin_reasoning_gym.barred import BARRED
from relax_plugin_reasoning_gym.recipe import Recipe, entry, open_set, set_names
from relax_plugin_reasoning_gym.tasks_file import FIELD, SEED_ROOM, TasksFile, read_tasks_file, shares

INSTRUCTION = "Think it through, then write the final answer, and nothing else, between <answer> and </answer>."
MOST_DRAWS = 64
"""Times that a task is drawn until its question is not excluded; a set that has asked in vain has hardly any left."""


class ReasoningGymOptions(Options):
    """Options of the source `reasoning-gym`."""

    instruction: str = INSTRUCTION
    """Text after each question, on lines of its own; it has to suit the option `answer` of the reward. Empty: none."""
    chat: bool = True
    """Ask by the model's chat template; false: the text as it stands, for models that have none."""
    allow_barred: bool = False
    """Use sets that are barred since their rule can be deceived or their tasks change."""


class ReasoningGymSource(TaskSource[ReasoningGymOptions]):
    """Tasks of the sets that a file lists.

    Invariants:
    - task `i` depends on the file, on those that it excludes, and on `i`; every stretch of tasks mixes the sets evenly;
    - no two tasks of a file, nor of files with different seeds, are made from one seed of reasoning-gym;
    - no task asks a question of an excluded file.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".gym",)

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        if columns:
            fix = "leave it out: the tasks are made, and their columns are answer, set, level and recipe"
            raise ConfigError("data.columns", dict(columns), fix)
        self._path, excluded = Path(path), set[str]()
        file = read_tasks_file(self._path)
        self._recipes = self._planned(self._path, file)
        for name in file.exclude:
            other = self._path.parent / name
            held_out = read_tasks_file(other)
            if held_out.exclude:
                fix = "leave `exclude` out there: only one of two files can make room for the other"
                raise ConfigError(FIELD, f"{other}, which excludes files itself", fix)
            excluded.update(entry(recipe)["question"] for recipe in self._planned(other, held_out))
        self._excluded = frozenset(excluded)

    def __len__(self) -> int:
        return len(self._recipes)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        recipe = self._drawn(index)
        made = entry(recipe)
        text = made["question"]
        if self.options.instruction:
            text = f"{text}\n\n{self.options.instruction}"
        columns = {"set": recipe.set, "recipe": recipe.as_column()}
        if recipe.level is not None:
            columns["level"] = recipe.level
        prompt = (Message("user", text),) if self.options.chat else text
        return Task(f"{self._path.stem}:{index}", prompt, made["answer"], columns)

    def where(self, index: int) -> str:
        return f"{self._path} task {index} ({self._recipes[index].set})"

    def _planned(self, path: Path, file: TasksFile) -> list[Recipe]:
        """Give the recipe of each task of a file, the sets evenly mixed. Raises ConfigError for a set that can't be used."""
        known, counts = set_names(), shares(file.sets, file.size)
        tables, first = [], file.seed * SEED_ROOM
        for at, (table, count) in enumerate(zip(file.sets, counts, strict=True)):
            key = f"{path}: sets.{at}.name"
            if table.name not in known:
                near = ", ".join(get_close_matches(table.name, known, 3)) or ", ".join(known)
                fix = f"did you mean one of {near}?"
                raise ConfigError(FIELD, f"{key}: {table.name!r}, which is no set of reasoning-gym", fix)
            if table.name in BARRED and not self.options.allow_barred:
                fix = "choose another, or set allow_barred = true under [source]"
                raise ConfigError(FIELD, f"{key}: {table.name!r}, which is barred: {BARRED[table.name]}", fix)
            if not count:
                raise ConfigError(
                    FIELD, f"{key}: {table.name!r} with no task of {file.size}", "raise size or its weight"
                )
            written = json.dumps(table.options, sort_keys=True)
            recipe = Recipe(table.name, first, count, 0, table.level, written)
            try:
                open_set(recipe)
            except ValueError as error:
                raise ConfigError(FIELD, f"{path}: sets.{at}: {error}", "correct it there") from error
            tables.append(recipe)
            first += count
        places = ((index + 0.5) / recipe.size for recipe in tables for index in range(recipe.size))
        recipes = (replace(recipe, index=index) for recipe in tables for index in range(recipe.size))
        return [recipe for _, recipe in sorted(zip(places, recipes, strict=True), key=lambda pair: pair[0])]

    def _drawn(self, index: int) -> Recipe:
        """Choose the first recipe for a task whose question is not excluded. Raises ConfigError where there is none."""
        recipe = self._recipes[index]
        if not self._excluded:
            return recipe
        for draw in range(min(MOST_DRAWS, SEED_ROOM // len(self))):
            drawn = replace(recipe, seed=recipe.seed + draw * len(self))
            if entry(drawn)["question"] not in self._excluded:
                return drawn
        fix = "exclude fewer tasks, or let its options make more different ones"
        raise ConfigError(FIELD, f"{self.where(index)}: every question drawn is in an excluded file", fix)
