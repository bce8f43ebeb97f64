# SPDX-License-Identifier: Apache-2.0
"""Recipes: the few values from which a reasoning-gym task is generated, and generated again to judge an answer.

An entry of reasoning-gym holds tuples, fractions and grids that do not survive a round trip through JSON. So a task
carries a recipe instead of an entry. Only this file uses the interface of reasoning-gym.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

DATASETS_KEPT = 128
"""Maximum number of cached datasets: one for each table of a tasks file, and one for each further seed with which a table's
tasks are generated because the first gave an excluded question. Most are tiny; some hold 10 to 20 MB of words or grids."""
ENTRIES_KEPT = 4096
"""Maximum number of cached entries, some kilobytes each. Generating an entry takes microseconds to tenths of a second."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The description of one task by set, seed and index.

    Invariants:
    - a recipe is plain data: the result of `as_column` survives JSON, and `of` reads it back;
    - two processes generate the same task from a recipe, unless its set is barred.
    """

    set: str
    seed: int
    """Seed of the dataset; most sets generate task `index` from `seed + index`."""
    size: int
    """Number of tasks in the dataset. A few sets generate all tasks together, so this number affects each task."""
    index: int
    """Index of the task in the dataset."""
    level: int | None = None
    """Level of the set's curriculum; None: the set's default options."""
    options: str = "{}"
    """The dataset's options as JSON with sorted keys."""

    @classmethod
    def of(cls, column: Any) -> Recipe:
        """Read a recipe from a task's column `recipe`. Raises ValueError if the column is not a recipe."""
        try:
            return cls(**{**column, "options": json.dumps(column["options"], sort_keys=True)})
        except (TypeError, KeyError) as error:
            raise ValueError(f"column 'recipe' must be a recipe of the source reasoning-gym: {column!r}") from error

    def as_column(self) -> dict[str, Any]:
        """Return the recipe as a column of a task."""
        return {**dataclasses.asdict(self), "options": json.loads(self.options)}


def set_names() -> list[str]:
    """Return the names of all sets in the installed reasoning-gym."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def open_set(recipe: Recipe) -> Any:
    """Return the dataset of a recipe, from the cache if possible. Raises ValueError for a wrong level or option."""
    return _dataset(dataclasses.replace(recipe, index=0))


@lru_cache(ENTRIES_KEPT)
def entry(recipe: Recipe) -> dict[str, Any]:
    """Return the entry of a recipe: `question`, `answer`, data for the set's rule. Callers must not change the entry."""
    dataset = open_set(recipe)
    with _apart(recipe):
        made: dict[str, Any] = dataset[recipe.index]
    return made


def set_score(recipe: Recipe, answer: str) -> float:
    """Score an answer with the set's own rule, which may raise any exception."""
    dataset, made = open_set(recipe), entry(recipe)
    with _apart(recipe):
        return float(dataset.score_answer(answer, made))


@contextlib.contextmanager
def _apart(recipe: Recipe) -> Iterator[None]:
    """Isolate a set's code from global state: drop its prints, and restore the global random generators afterwards.

    Python's random generator is seeded from the recipe, so the code's random draws depend only on the recipe.
    """
    import numpy

    drawn, numpy_drawn = random.getstate(), numpy.random.get_state()
    random.seed(f"{recipe.set} {recipe.seed} {recipe.index}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(drawn)
        numpy.random.set_state(numpy_drawn)


@lru_cache(DATASETS_KEPT)
def _dataset(recipe: Recipe) -> Any:
    from reasoning_gym.factory import CURRICULA, DATASETS

    name, options = recipe.set, json.loads(recipe.options)
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no set {name!r}")
    dataset_class, config_class = DATASETS[name]
    own = sorted({field.name for field in dataclasses.fields(config_class)} - {"seed", "size"})
    if unknown := sorted(set(options) - set(own)):
        raise ValueError(f"the set {name!r} has no option {unknown[0]!r}; its options: {', '.join(own) or 'none'}")
    given = {"seed": recipe.seed, "size": recipe.size}
    try:
        with _apart(recipe):
            if recipe.level is None:
                config = config_class(**given, **options)
            else:
                config = dataclasses.replace(_at_level(CURRICULA, name, recipe.level, given), **options)
            if hasattr(config, "validate"):
                config.validate()
            return dataset_class(config)
    except (AssertionError, TypeError, ValueError) as error:
        at = "" if recipe.level is None else f" at level {recipe.level}"
        raise ValueError(f"the set {name!r}{at} refuses its options: {error}") from error


def _at_level(curricula: Mapping[str, Any], name: str, level: int, given: Mapping[str, int]) -> Any:
    """Return the configuration of a set at a level of its curriculum. Raises ValueError if the level does not exist."""
    if name not in curricula:
        raise ValueError("the set has no curriculum, and so no levels; remove level")
    curriculum = curricula[name]()
    highest = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
    if level > highest:
        raise ValueError(f"the set has only levels 0 to {highest}")
    curriculum.set_global_level(level)
    return curriculum.generate_configuration(dict(given))
