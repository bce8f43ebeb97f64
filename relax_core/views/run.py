# SPDX-License-Identifier: Apache-2.0
"""A run as a reader sees it: `open_run(dir)` for notebooks and for the other views. Reads only; safe on a live run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.observe.journal import read_lines
from relax_core.observe.run_directory import RunDirectory, find_run

_NOT_METRICS = ("schema", "time", "elapsed_s")


class Metrics(list[dict[str, Any]]):
    """One mapping a step, with `step` and the step's metrics. `pandas.DataFrame(metrics)` is the table."""

    @classmethod
    def merged(cls, records: Iterable[dict[str, Any]]) -> Metrics:
        """Lines of one step together; what was written later wins."""
        steps: dict[int, dict[str, Any]] = {}
        for record in records:
            if isinstance(record.get("step"), int):
                kept = {key: value for key, value in record.items() if key not in _NOT_METRICS}
                steps.setdefault(record["step"], {}).update(kept)
        return cls(steps[step] for step in sorted(steps))

    def column(self, key: str) -> list[float]:
        """The values of one key, in order of steps; steps without it are left out."""
        return [value for _, value in self.points(key)]

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of one key."""
        return [(record["step"], record[key]) for record in self if record.get(key) is not None]

    def names(self) -> list[str]:
        """All keys that some step has."""
        return sorted({key for record in self for key in record if key != "step"})


class RunView:
    """One run directory."""

    def __init__(self, path: Path) -> None:
        self._directory = RunDirectory.open(path)

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def name(self) -> str:
        return self._directory.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        source = self.path / "config.toml"
        try:
            return tomllib.loads(source.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(str(source), f"text that is not TOML ({error})", "restore the file") from error

    def summary(self) -> dict[str, Any]:
        """How the run ended; empty while it goes."""
        return self._directory.read("summary") or {}

    def status(self) -> dict[str, Any]:
        """What the run last said of its roles; empty before it said anything."""
        return self._directory.read("status") or {}

    def document(self, name: str) -> dict[str, Any]:
        """plugins, provenance or trace; empty where there is none."""
        return self._directory.read(name) or {}

    def metrics(self) -> Metrics:
        """Every step's metrics so far."""
        return Metrics.merged(self._directory.metrics())

    def samples(self, step: int) -> list[dict[str, Any]]:
        """The transcripts of a step."""
        return list(self._directory.samples(step))

    def sample_steps(self) -> list[int]:
        """Steps that have transcripts."""
        return self._directory.sample_steps()

    def preview(self, kind: str, key: str) -> bytes | None:
        """The copy for people of a medium that samples show; None where none was kept."""
        if not key.isalnum():
            return None
        for folder in (self.path, *sorted(self.path.glob("stages/*"))):
            file = folder / "media" / "previews" / f"{key}.{kind}"
            if file.is_file():
                return file.read_bytes()
        return None

    def log(self, role: str = "controller") -> Iterator[dict[str, Any]]:
        """The records of a role's log."""
        return read_lines(self.path / "logs" / f"{role}.jsonl")


def open_run(run: str | Path | None = None) -> RunView:
    """A run by directory or by name under `$RELAX_RUNS`; the latest without one."""
    return RunView(find_run(str(run) if run is not None else None))
