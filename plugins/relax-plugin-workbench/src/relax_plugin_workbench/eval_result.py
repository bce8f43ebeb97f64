# SPDX-License-Identifier: Apache-2.0
"""The folder of a result of `relax eval`: `eval.json` with the rewards by task, all samples, and the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.runs import (
    Redactor,
    check_new_folder,
    disk_errors,
    encode,
    read_document,
    write_document,
    write_text,
)

FILE, SAMPLES = "eval.json", "samples.jsonl"
SCHEMA = "relax.eval/1"
ROOT = Path("evals")
"""Parent of result folders that the user does not name."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of one evaluation."""

    target: str
    """Name of the evaluated model folder or run."""
    step: int | None
    """Step of the run whose weights were evaluated; None for a model folder."""
    seed: int
    """Seed of the samples. Two results with the same seed draw each task alike."""
    sets: tuple[dict[str, Any], ...]
    """One record per evaluation set: `set`, `step`, `temperature`, `mean`, `count`, `metrics`, and `tasks`: the rewards
    of each task's judged samples, by a hash of the task's content."""
    directory: Path
    """Folder of the result."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the user, such as the number of skipped tasks."""

    def write(self, config: str, samples: Iterable[Mapping[str, Any]], redactor: Redactor) -> None:
        """Write the folder: `config` as TOML, one line per sample, and the result last."""
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.directory / "config.toml", redactor.known(config))
        lines = (encode({"schema": "relax.sample/1", **sample}) + "\n" for sample in samples)
        write_text(self.directory / SAMPLES, "".join(redactor.known(line) for line in lines))
        write_document(self.directory / FILE, SCHEMA, self.document())

    def document(self) -> dict[str, object]:
        return {"target": self.target, "step": self.step, "seed": self.seed, "sets": self.sets}


def is_result(directory: Path) -> bool:
    """Return True if a folder holds the result of an evaluation."""
    return (directory / FILE).is_file()


def read_result(directory: Path) -> EvalResult:
    """Read the result in a folder. Raises ConfigError if the file is damaged or has another schema."""
    document = read_document(directory / FILE) or {}
    try:
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}")
        sets = tuple({**record, "set": str(record["set"]), "step": int(record["step"]), "tasks": dict(record["tasks"])}
                     for record in document["sets"])  # fmt: skip
        return EvalResult(str(document["target"]), document["step"], int(document["seed"]), sets, directory)
    except (LookupError, TypeError, ValueError) as error:
        got = f"unexpected content ({type(error).__name__}: {error})"
        raise ConfigError(str(directory / FILE), got, "restore the file, or evaluate again") from error


def result_folder(out: Path | None, name: str) -> Path:
    """Return the folder for a result: `out`, which must be new or empty, or a new folder with this name in `ROOT`."""
    if out is None:
        number, folder = 1, ROOT.absolute() / name
        while folder.exists():
            number += 1
            folder = folder.with_name(f"{name}-{number}")
        return folder
    check_new_folder(out)
    return out.absolute()
