# SPDX-License-Identifier: Apache-2.0
"""The task source `reasoning-gym`: generates tasks on request from a tasks file (`NAME.gym`).

Tasks are not stored. Each task depends only on the file, so a resumed run continues with the same tasks, and the reward
can generate a task again.
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
"""Maximum number of draws to find a question that is not excluded; a set that needs more has hardly any left."""


class ReasoningGymOptions(Options):
    """Options of the source `reasoning-gym`."""

    instruction: str = INSTRUCTION
    """Text after each question and an empty line. It must ask for the answer in the form that the reward's option
    `answer` reads. Empty: no text."""
    chat: bool = True
    """True: use the model's chat template. False: send the plain text, for models without a chat template."""
    allow_barred: bool = False
    """Allow barred sets: sets with a rule that can be exploited, or with tasks that differ between processes."""


class ReasoningGymSource(TaskSource[ReasoningGymOptions]):
    """The tasks of the sets that a tasks file lists.

    Invariants:
    - task `i` depends only on the file, on the files that it excludes, and on `i`; the sets are evenly mixed;
    - no two tasks of a file, or of files with different seeds, are generated from the same seed of reasoning-gym;
    - no task has a question from an excluded file.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".gym",)

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        if columns:
            fix = "remove it: the tasks are made by reasoning-gym, with the columns answer, set, level and recipe"
            raise ConfigError("data.columns", dict(columns), fix)
        self._path, excluded = Path(path), set[str]()
        file = read_tasks_file(self._path)
        self._recipes = self._planned(self._path, file)
        for name in file.exclude:
            other = self._path.parent / name
            held_out = read_tasks_file(other)
            if held_out.exclude:
                fix = "remove `exclude` from that file: an excluded file cannot exclude files itself"
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
        """Return one recipe per task, with each set spread evenly. Raises ConfigError for a set that can't be used."""
        known, counts = set_names(), shares(file.sets, file.size)
        tables, first = [], file.seed * SEED_ROOM
        for at, (table, count) in enumerate(zip(file.sets, counts, strict=True)):
            key = f"{path}: sets.{at}.name"
            if table.name not in known:
                near = ", ".join(get_close_matches(table.name, known, 3)) or ", ".join(known)
                fix = f"did you mean one of {near}?"
                raise ConfigError(FIELD, f"{key}: {table.name!r}, which reasoning-gym does not have", fix)
            if table.name in BARRED and not self.options.allow_barred:
                fix = "choose another set, or set allow_barred = true under [source]"
                raise ConfigError(FIELD, f"{key}: {table.name!r}, which is barred: {BARRED[table.name]}", fix)
            if not count:
                raise ConfigError(
                    FIELD, f"{key}: {table.name!r} gets 0 of {file.size} tasks", "raise size or the set's weight"
                )
            written = json.dumps(table.options, sort_keys=True)
            recipe = Recipe(table.name, first, count, 0, table.level, written)
            try:
                open_set(recipe)
            except ValueError as error:
                raise ConfigError(FIELD, f"{path}: sets.{at}: {error}", "correct this entry") from error
            tables.append(recipe)
            first += count
        places = ((index + 0.5) / recipe.size for recipe in tables for index in range(recipe.size))
        recipes = (replace(recipe, index=index) for recipe in tables for index in range(recipe.size))
        return [recipe for _, recipe in sorted(zip(places, recipes, strict=True), key=lambda pair: pair[0])]

    def _drawn(self, index: int) -> Recipe:
        """Return a task's first draw with a question that is not excluded. Raises ConfigError after `MOST_DRAWS`."""
        recipe = self._recipes[index]
        if not self._excluded:
            return recipe
        for draw in range(min(MOST_DRAWS, SEED_ROOM // len(self))):
            drawn = replace(recipe, seed=recipe.seed + draw * len(self))
            if entry(drawn)["question"] not in self._excluded:
                return drawn
        fix = "exclude fewer tasks, or choose options that give the set more different questions"
        raise ConfigError(FIELD, f"{self.where(index)}: every question drawn is in an excluded file", fix)
