# SPDX-License-Identifier: Apache-2.0
"""`relax replay`: train a recorded step of a run again, in a copy of the run, and compare it with the record.

The copy starts from the newest checkpoint before the step, or from the start of the run. The run directory is only read.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.events import Event, StepFinished
from relax_core.api.run_commands import Stop
from relax_core.launch import compose, prepare_resume, run, stage_directories
from relax_core.roles.checkpoint import complete, read_whole, step_of
from relax_core.runs import RunView, check_new_folder, disk_errors, open_run, to_toml, write_text
from relax_core.tensor_files.safetensors_file import read

COMPARED = (
    "reward/",
    "pairs/",
    "lag/",
    "length/",
    "policy/",
    "distill/",
    "routing/",
    "train/",
    "critic/",
    "tokens/trained",
)
"""Beginnings of the metrics that a repeated step must give again. The rest are times, and totals of the whole run."""
SAMPLE_KEYS = ("prompt", "response", "reward", "outcome")
KEPT = 1_000_000
"""Value of `checkpoint.keep` with which the copy deletes no checkpoint."""


class ComparedMetric(NamedTuple):
    """A metric of the record and of the replay; None: absent."""

    key: str
    recorded: float | None
    replayed: float | None


@dataclass(frozen=True, slots=True)
class Replay:
    """A repeated step beside its record."""

    run: str
    step: int
    start: int
    """Step of the checkpoint that the copy started from; 0: the start of the run."""
    deterministic: bool
    """True if the run was deterministic, so that an unchanged replay must be identical."""
    changes: tuple[str, ...]
    """Overrides of the run's configuration, which apply from `start` on."""
    metrics: tuple[ComparedMetric, ...]
    num_samples: int
    """Samples of the record."""
    changed_samples: tuple[str, ...]
    """`group/sample` of the samples that differ or that only one side has."""
    weights: bool | None
    """True if the trained weights are equal, bit for bit; None: the run has no checkpoint of this step."""
    directory: Path | None
    """Run directory of the copy; None if it was deleted."""

    @property
    def changed_metrics(self) -> tuple[ComparedMetric, ...]:
        return tuple(metric for metric in self.metrics if metric.recorded != metric.replayed)

    @property
    def identical(self) -> bool:
        """True if nothing that was compared differs."""
        return not (self.changed_metrics or self.changed_samples or self.weights is False)


def replay(name: str | None, step: int, overrides: Sequence[str] = (), out: Path | None = None) -> Replay:
    """Train step `step` of a run again and compare it with the record.

    `overrides`: changes of the configuration. `out`: a new folder that keeps the copy; None: the copy is deleted. The
    copy runs on this machine, also if the run used Ray. Raises ConfigError if the step is not recorded, and the
    errors of a resumed run.
    """
    source = open_run(name)
    if stage_directories(source.path):
        raise ConfigError("run", f"{source.path}, a run with stages", "replay a run without [[stages]]")
    recorded = _trained_steps(source)
    if step not in recorded:
        steps = f"the record has the steps {min(recorded)} to {max(recorded)}" if recorded else "no step is recorded"
        raise ConfigError("--step", str(step), steps)
    if out is not None:
        check_new_folder(out)
    with tempfile.TemporaryDirectory(prefix="relax-replay-") as scratch:
        folder = (out or Path(scratch) / source.name).absolute()
        start, deterministic = _copy(source.path, step, overrides, folder)
        # Run the copy until `step` is recorded. The length of the run stays, because schedules depend on it.
        prepared = prepare_resume(folder, (), unfinished=True)
        copy = open_run(folder)
        prepared.catalogue.observe("replay", partial(_stop_after, step, copy))
        run(prepared)
        again = _trained_steps(copy)
        if step not in again:
            raise RelaxError(f"the replay ended before step {step}; keep its files with --out to see why")
        first, second = (
            {f"{sample['group_id']}/{sample['sample_index']}": [sample.get(key) for key in SAMPLE_KEYS]
             for sample in view.samples(step) if "group_id" in sample}
            for view in (source, copy)
        )  # fmt: skip
        changed = tuple(sorted(name for name in {*first, *second} if first.get(name) != second.get(name)))
        keys = sorted(key for key in {*recorded[step], *again[step]} if key.startswith(COMPARED))
        return Replay(
            source.name, step, start, deterministic, tuple(overrides),
            tuple(ComparedMetric(key, recorded[step].get(key), again[step].get(key)) for key in keys), len(first), changed,
            _equal_weights(source.path, folder, step), None if out is None else folder,
        )  # fmt: skip


def _copy(source: Path, step: int, overrides: Sequence[str], folder: Path) -> tuple[int, bool]:
    """Lay out a run directory that continues from the newest checkpoint before `step`.

    Return the checkpoint's step, and whether the configuration is deterministic.
    """
    before = [path for path in complete(source / "checkpoints") if step_of(path) < step]
    if before:
        read_whole(before[-1])  # an error names the run's own file
    composed = compose([source / "config.toml"], overrides)
    config = composed.config
    config = config.model_copy(update={
        "sinks": (),
        "plugin_tables": {name: own for name, own in config.plugin_tables.items() if not own.of_the_run},
        "checkpoint": config.checkpoint.model_copy(update={"every": step, "keep": KEPT}),
        "export": config.export.model_copy(update={"every": 0}),
        "run": config.run.model_copy(update={"runner": "local" if config.run.runner == "ray" else config.run.runner}),
    })  # fmt: skip
    if config.steps < step:
        raise ConfigError("steps", str(config.steps), f"step {step} needs at least {step}")
    with disk_errors(folder):
        for name in ("samples", "logs", "checkpoints"):
            (folder / name).mkdir(parents=True)
        for name in ("data.json", "plugins.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if before:
            shutil.copytree(before[-1], folder / "checkpoints" / before[-1].name)
    write_text(folder / "config.toml", to_toml(config.dump()))
    return step_of(before[-1]) if before else 0, config.deterministic


def _stop_after(step: int, copy: RunView, event: Event) -> None:
    if isinstance(event, StepFinished) and event.step == step:
        copy.send(Stop())


def _trained_steps(view: RunView) -> dict[int, dict[str, float]]:
    """Return the metrics of each trained step."""
    return {record["step"]: record for record in view.metrics() if "tokens/trained" in record}


def _equal_weights(source: Path, folder: Path, step: int) -> bool | None:
    """Compare the tensors in both checkpoints of a step; None if the run has none, or one without safetensors."""
    checkpoints = (root / "checkpoints" / f"step-{step:06d}" for root in (source, folder))
    first, second = ({path.relative_to(top): path for path in top.rglob("*.safetensors")} for top in checkpoints)
    if not first:
        return None
    if first.keys() != second.keys():
        return False
    for file in first:  # compared by name: the order of names in a file's header may differ
        left, right = read(first[file]), read(second[file])
        if left.dtypes != right.dtypes or not all(
            tensor.shape == right.tensors[name].shape and np.array_equal(_bytes(tensor), _bytes(right.tensors[name]))
            for name, tensor in left.tensors.items()
        ):
            return False
    return True


def _bytes(tensor: np.ndarray) -> np.ndarray:
    return np.ravel(tensor).view(np.uint8)  # so that a NaN equals itself
