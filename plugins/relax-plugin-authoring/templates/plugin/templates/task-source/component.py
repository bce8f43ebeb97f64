"""The task source `{{ cookiecutter.name }}`: reads tasks from a TOML file, one table `[[tasks]]` for each task."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_core.api import BadRow, ConfigError, Message, Options, Task, TaskSource


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    chat: bool = True
    """True: render the prompt with the model's chat template. False: send the plain text."""


class {{ cookiecutter.class_name }}(TaskSource[{{ cookiecutter.class_name }}Options]):
    """The tasks of a TOML file. A task has a text `prompt`; its other keys are columns, such as `answer`."""

    suffixes = (".toml",)  # `relax data check FILE` chooses the source by the file's suffix

    def open(self, path: str, columns: Mapping[str, str]) -> None:
        """Read and check the whole file, so that a run with a bad row ends before it starts."""
        self._path = Path(path)
        try:
            read = tomllib.loads(self._path.read_text()).get("tasks", [])
        except (OSError, ValueError) as error:
            raise ConfigError("data", f"{path}: {error}", "give a readable TOML file with [[tasks]]") from error
        rows: list[Mapping[str, Any]] = read if isinstance(read, list) else []
        # `columns` renames: the task's column `prompt` may be the file's column `question`.
        names = {of_file: of_task for of_task, of_file in columns.items()}
        self._rows = [{names.get(name, name): value for name, value in row.items()} for row in rows]
        self._bad = [
            BadRow(self.where(index), "no text", "prompt", 'write prompt = "..."')
            for index, row in enumerate(self._rows)
            if not isinstance(row.get("prompt"), str)
        ]
        if self._bad or not rows:
            bad = self._bad[0] if self._bad else BadRow(path, "no tasks", "", "write at least one table [[tasks]]")
            raise ConfigError("data", f"{bad.where}: {bad.reason} {bad.field}".strip(), bad.fix)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        """Return a task. Its id stays the same in every run; its content depends only on the file and the options."""
        columns = dict(self._rows[index])
        prompt, answer = columns.pop("prompt"), columns.pop("answer", None)
        asked = (Message("user", prompt),) if self.options.chat else prompt
        return Task(f"{self._path.stem}:{index}", asked, answer, columns)

    def where(self, index: int) -> str:
        return f"{self._path}: task {index + 1}"

    def problems(self) -> Iterator[BadRow]:
        return iter(self._bad)
