# SPDX-License-Identifier: Apache-2.0
"""Tasks files, `NAME.gym`: TOML with the number of tasks, the seed, and the sets of reasoning-gym to use.

    size = 1000
    seed = 1
    exclude = ["held-out.gym"]

    [[sets]]
    name = "chain_sum"
    weight = 2
    options = { min_terms = 2, max_terms = 3 }

Training and evaluation use separate files.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, ValidationError, field_validator

from relax_core.api import ConfigError, Options
from relax_core.api.files import read_text

FIELD = "data"
SEED_ROOM = 1 << 20
"""Number of reasoning-gym seeds that belong to one seed of a tasks file. Most sets generate task `i` from `seed + i`;
without this distance, files with adjacent seeds would share nearly all tasks. Some sets accept only 32-bit seeds."""


class SetTable(Options):
    """One entry of `[[sets]]`; a set may have several entries, such as one for each level."""

    name: str
    """Name of the set in reasoning-gym."""
    weight: PositiveFloat = 1.0
    """Weight of this entry; its share of the tasks is the weight divided by the sum of all weights."""
    level: NonNegativeInt | None = None
    """Level of the set's curriculum. 0 is the easiest; a level includes the easier tasks below it. Absent: the set's
    default options."""
    options: dict[str, Any] = {}
    """Options of the set, which override the values of `level`."""

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options)
        except TypeError as error:
            raise ValueError(f"options must be JSON data; write dates and times as text ({error})") from error
        return options


class TasksFile(Options):
    """The content of a tasks file."""

    sets: tuple[SetTable, ...] = Field(min_length=1)
    """The sets that generate the tasks, evenly mixed."""
    size: int = Field(1000, ge=1, le=SEED_ROOM >> 2)
    """Number of tasks in the file."""
    seed: int = Field(0, ge=0, lt=(1 << 32) // SEED_ROOM)
    """Seed of the tasks. Files with different seeds have no seed of reasoning-gym in common."""
    exclude: tuple[str, ...] = ()
    """Paths, relative to this file's folder, of tasks files whose questions must not occur; a task with such a question
    is drawn again."""


def read_tasks_file(path: Path) -> TasksFile:
    """Read and check a tasks file. Raises ConfigError naming the file and the faulty key."""
    try:
        data = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(FIELD, f"{path}: {error.strerror}", "name a .gym file that lists [[sets]]") from error
    except ValueError as error:
        raise ConfigError(FIELD, f"{path}: {error}", "write it as TOML in UTF-8") from error
    try:
        return TasksFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(FIELD, f"{path}: {key}: {first['msg']}", "correct this key") from error


def shares(tables: tuple[SetTable, ...], size: int) -> list[int]:
    """Return each table's number of tasks, by weight. Tables with the largest remainders get the tasks left over."""
    total = sum(table.weight for table in tables)
    exact = [size * table.weight / total for table in tables]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(tables)), key=lambda at: counts[at] - exact[at])
    for at in by_remainder[: size - sum(counts)]:
        counts[at] += 1
    return counts
