# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of task sources: reproducible access by index, and errors that name the file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from relax_core.api.errors import ConfigError
from relax_core.api.source import BadRow
from relax_core.api.task import Task
from relax_core.testing.suite import Suite

ROWS: tuple[Mapping[str, Any], ...] = tuple(
    {"prompt": f"What is {n} + 1?", "answer": str(n + 1), "n": n} for n in range(5)
)


class TaskSourceSuite(Suite):
    """The suite of a source; a subclass sets `component`, and implements `store` for files that are not `.jsonl`."""

    kind = "task-source"
    columns: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def store(cls, rows: tuple[Mapping[str, Any], ...], directory: Path) -> str:
        """Write rows in the source's format to the directory; return the path to open."""
        suffixes = getattr(cls.target(), "suffixes", ())
        if ".jsonl" not in suffixes:
            raise NotImplementedError(
                f"the source reads {', '.join(suffixes) or 'no suffix'}; implement `store` in its suite"
            )
        path = directory / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    @classmethod
    def exercise(cls, component: Any) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            component.open(cls.store(ROWS, Path(directory)), cls.columns)
            tasks = [component[index] for index in range(len(component))]
            return [[task.id, repr(task.prompt), repr(task.answer), repr(dict(task.metadata))] for task in tasks]

    @pytest.fixture
    def opened(self, made: Any, tmp_path: Path) -> Any:
        made.open(self.store(ROWS, tmp_path), self.columns)
        return made

    def test_every_row_is_a_task_with_an_id_of_its_own(self, opened: Any) -> None:
        tasks = [opened[index] for index in range(len(opened))]
        assert len(tasks) == len(ROWS)
        assert all(isinstance(task, Task) for task in tasks)
        assert len({task.id for task in tasks}) == len(tasks), "two tasks have the same id"

    def test_tasks_can_be_read_in_any_order(self, opened: Any) -> None:
        forwards = [opened[index] for index in range(len(opened))]
        backwards = [opened[index] for index in reversed(range(len(opened)))]
        assert backwards[::-1] == forwards

    def test_answer_and_other_columns_arrive(self, opened: Any) -> None:
        assert [opened[index].column("answer") for index in range(len(ROWS))] == [row["answer"] for row in ROWS]
        assert [opened[index].column("n") for index in range(len(ROWS))] == [row["n"] for row in ROWS]

    def test_a_sound_file_has_no_problems(self, opened: Any) -> None:
        problems = list(opened.problems())
        assert all(isinstance(problem, BadRow) for problem in problems) and problems == []

    def test_a_missing_file_is_a_configuration_error(self, made: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="nowhere"):
            made.open(str(tmp_path / "nowhere.jsonl"), self.columns)
