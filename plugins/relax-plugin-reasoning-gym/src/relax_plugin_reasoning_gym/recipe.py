# SPDX-License-Identifier: Apache-2.0
"""A recipe: the few values that one task of reasoning-gym is made from, and made from again where it is judged.

Entries hold tuples, fractions and grids that JSON does not give back as they were, so a task carries its recipe and no entry.
All that is known about the package's own interface is in this file.
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
"""Datasets that are kept: one for each entry of a tasks file, and for each time that tasks of it are drawn anew. Most weigh
nothing, some hold 10 to 20 MB of words or grids."""
ENTRIES_KEPT = 4096
"""Entries that are kept, some kilobytes each: making one takes from microseconds to tenths of a second."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One task by name and number.

    Invariants:
    - plain data: what `as_column` gives passes through JSON, and `of` reads it back;
    - two processes make the same task of it, unless its set is barred.
    """

    set: str
    seed: int
    """The dataset's own seed; a set makes its task `index` from `seed + index`."""
    size: int
    """Tasks of the dataset; a few sets make all of them together, so that it matters."""
    index: int
    level: int | None = None
    options: str = "{}"
    """The dataset's options as JSON with sorted keys."""

    @classmethod
    def of(cls, column: Any) -> Recipe:
        """Read the column of a task. Raises ValueError for anything else."""
        try:
            return cls(**{**column, "options": json.dumps(column["options"], sort_keys=True)})
        except (TypeError, KeyError) as error:
            raise ValueError(f"the column 'recipe' is no recipe of the source reasoning-gym: {column!r}") from error

    def as_column(self) -> dict[str, Any]:
        """Give the recipe as a column of a task."""
        return {**dataclasses.asdict(self), "options": json.loads(self.options)}


def set_names() -> list[str]:
    """List the names of all sets that the installed reasoning-gym has."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def open_set(recipe: Recipe) -> Any:
    """Make the dataset of a recipe, once. Raises ValueError, which says what is wrong with its level or options."""
    return _dataset(dataclasses.replace(recipe, index=0))


@lru_cache(ENTRIES_KEPT)
def entry(recipe: Recipe) -> dict[str, Any]:
    """Make the entry of a recipe: `question`, `answer`, and what the set's rule reads. Leave it as it is: it is kept."""
    dataset = open_set(recipe)
    with _apart(recipe):
        made: dict[str, Any] = dataset[recipe.index]
    return made


def set_score(recipe: Recipe, answer: str) -> float:
    """Score an answer by the set's own rule, which may raise anything."""
    dataset, made = open_set(recipe), entry(recipe)
    with _apart(recipe):
        return float(dataset.score_answer(answer, made))


@contextlib.contextmanager
def _apart(recipe: Recipe) -> Iterator[None]:
    """Run code of a set where it disturbs nothing: some print, draw from the global random numbers, or seed them.

    What they draw there is made a function of the recipe.
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
        raise ValueError(f"the set {name!r} has no option {unknown[0]!r}; it has {', '.join(own) or 'none'}")
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
    """Make the configuration of a set at a level of its curriculum. Raises ValueError where there is no such level."""
    if name not in curricula:
        raise ValueError("it has no curriculum, and so no levels")
    curriculum = curricula[name]()
    highest = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
    if level > highest:
        raise ValueError(f"its levels are 0 to {highest}")
    curriculum.set_global_level(level)
    return curriculum.generate_configuration(dict(given))
