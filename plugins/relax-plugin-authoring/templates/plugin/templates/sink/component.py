"""The sink `{{ cookiecutter.name }}`: writes the metrics of each step as one JSON object to a line of a file.

A thread of the sink makes all calls after `check`, and the run waits for none of them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.api import Options, Sink


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    file: str = "{{ cookiecutter.name }}.jsonl"
    """Path of the file; a relative path starts in the run directory."""


class {{ cookiecutter.class_name }}(Sink[{{ cookiecutter.class_name }}Options]):
    """Appends a line to the file at each call. A resumed run replaces the lines from its first step on."""

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        """Start to write for a run, or continue after a resume. To send data elsewhere, open the connection here."""
        self._path = Path(run_dir) / self.options.file
        self._continued = not self._path.exists()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step. `values` may have NaN and infinity, and later steps may have other keys."""
        trained = any(not key.startswith("eval/") for key in values)  # a resumed run may first evaluate its old step
        if trained and not self._continued:
            self._keep(step - 1)
            self._continued = True
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def rewind(self, step: int, last: int) -> None:
        """Remove the steps after `step`, which a rollback has undone. Without this method, a metric marks the place."""
        self._keep(step)

    def _keep(self, step: int) -> None:
        """Remove all lines after this step."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        self._path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
