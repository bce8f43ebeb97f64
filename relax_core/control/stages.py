# SPDX-License-Identifier: Apache-2.0
"""Directories of a run's stages: their configuration, their progress, and the allowed order of stages.

`stages/0-<name>/` holds the ledger, checkpoints, export and resolved configuration of a stage, as the run directory
does for a run without stages. Metrics, samples and the summary of all stages are in the run directory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from relax_core.api.algorithm import Algorithm, Output
from relax_core.api.errors import ConfigError
from relax_core.config.compose import Stage
from relax_core.config.run_config import RunConfig, to_toml
from relax_core.observe.files import read_document, sync_to_disk, write_document, write_text
from relax_core.registry.catalogue import Catalogue
from relax_core.roles.checkpoint import complete
from relax_core.runners.launch import STAGES

DONE = "stage.json"


@dataclass(frozen=True, slots=True)
class StageDirectory:
    """The directory of one stage."""

    number: int
    name: str
    path: Path

    def account(self) -> dict[str, Any] | None:
        """Read the account of the stage's samples; None while unfinished. Raises ConfigError without `steps`."""
        found = read_document(self.path / DONE)
        if found is not None and type(found.get("steps")) is not int:
            got = f"steps of {found.get('steps')!r}"
            raise ConfigError(
                str(self.path / DONE), got, "restore the file: a finished stage has a whole number of steps"
            )
        return found

    def finish(self, account: Mapping[str, Any]) -> None:
        """Write the account of the stage's samples; the file marks the stage as finished."""
        write_document(self.path / DONE, "relax.stage/1", {"name": self.name, **account})

    def write(self, config: RunConfig) -> None:
        """Write the resolved configuration."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "config.toml", f"# schema: relax.config/1\n{to_toml(config.dump())}")
        for folder in (self.path.parent, self.path.parent.parent):  # the parent folders may be new, too
            sync_to_disk(folder)

    def discard_work(self) -> None:
        """Delete everything but the configuration, for a stage that never reached a checkpoint."""
        for left in [found for found in self.path.iterdir() if found.name != "config.toml"]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def stage_directories(run_dir: Path) -> list[StageDirectory]:
    """Return the stages of a run in order; empty for a run without stages."""
    found = []
    for path in (run_dir / STAGES).glob("*-*"):
        number, _, name = path.name.partition("-")
        if number.isdecimal():
            found.append(StageDirectory(int(number), name, path))
    return sorted(found, key=lambda stage: stage.number)


def resumable_step(run_dir: Path) -> int | None:
    """Return the step from which a resumed run would continue; None without a checkpoint or finished stage."""
    done = 0
    for stage in stage_directories(run_dir) or [StageDirectory(0, "", run_dir)]:
        account = stage.account()
        if account is None:
            found = complete(stage.path / "checkpoints")
            return done + int(found[-1].name.removeprefix("step-")) if found else done or None
        done += int(account["steps"])
    return None


def lay_out(run_dir: Path, stages: Sequence[Stage]) -> list[tuple[StageDirectory, RunConfig]]:
    """Write each stage's directory with its resolved configuration; each later stage trains the previous export."""
    laid: list[tuple[StageDirectory, RunConfig]] = []
    for number, stage in enumerate(stages):
        directory, config = (
            StageDirectory(number, stage.name, run_dir / STAGES / f"{number}-{stage.name}"),
            stage.config,
        )
        if laid:
            model = config.model.model_copy(update={"path": laid[-1][0].path / "export"})
            config = config.model_copy(update={"model": model})
        directory.write(config)
        laid.append((directory, config))
    return laid


def check_order(stages: Sequence[Stage], catalogue: Catalogue) -> None:
    """Raise ConfigError if a stage can't train the export of the previous stage."""

    def scores(stage: Stage) -> bool:
        algorithm = catalogue.build(stage.config.algorithm.chosen)
        return isinstance(algorithm, Algorithm) and algorithm.outputs() == frozenset({Output("rewards")})

    for at, (before, after) in enumerate(pairwise(stages)):
        if scores(before) and not scores(after):
            got = f"{after.config.algorithm.name} after {before.config.algorithm.name}, whose export is a reward model"
            fix = "train the reward model last, or in a run of its own"
            raise ConfigError(f"stages[{at + 1}].algorithm.name", got, fix)
        if before.config.model.lora is not None:
            fix = "leave model.lora out of every stage but the last: adapters are exported without their model"
            raise ConfigError(f"stages[{at}].model.lora", f"adapters before stage {after.name}", fix)


def point_to_export(run_dir: Path, stage: StageDirectory) -> None:
    """Link the run's export to the export of its last stage."""
    link, export = run_dir / "export", stage.path / "export"
    if export.is_dir() and not link.exists():
        link.symlink_to(os.path.relpath(export, run_dir))


def document(stages: Sequence[Stage]) -> str:
    """Return the whole run as one TOML: the first stage, then the differences of each stage from the first."""
    first = stages[0].config.dump()
    tables: list[dict[str, Any]] = []
    for at, stage in enumerate(stages):
        own = dict(_differing(stage.config.dump(), first)) if at else {}
        if isinstance(model := own.get("model"), dict):
            model.pop("path", None)
        tables.append({"name": stage.name, **own})
    return to_toml({**first, "stages": tables})


def _differing(mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for key, value in mine.items():
        theirs = other.get(key)
        if value == theirs:
            continue
        if isinstance(value, dict) and isinstance(theirs, dict) and value.get("name") == theirs.get("name"):
            yield key, dict(_differing(value, theirs))
        else:
            yield key, value
