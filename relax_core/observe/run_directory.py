# SPDX-License-Identifier: Apache-2.0
"""The run directory: names and locations of a run's files, their one writer, and their rewind when the run rolls back.

Documents are replaced as a whole, metrics and samples are only appended, and secrets are redacted. The recorder fills
the directory, and the package `views` reads it. Every JSON document and line has a `schema`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, Self

from relax_core.api.errors import ConfigError, DiskFull, InfrastructureError
from relax_core.api.run_commands import NAMES, Command, named_command
from relax_core.observe.epoch import WriterLock
from relax_core.observe.event_log import EVENTS
from relax_core.observe.files import (
    disk_errors,
    encode,
    plain,
    read_document,
    sync_to_disk,
    write_bytes,
    write_document,
    write_text,
)
from relax_core.observe.records import (
    AppendOnlyFile,
    frame,
    read_frames,
    read_lines,
    whole_frames,
    whole_lines,
)
from relax_core.observe.redaction import Redactor
from relax_core.observe.status import status_document
from relax_core.registry.shapes import WrongShape, checked

LETTERS = "abcdefghijkmnopqrstuvwxyz"
TRIES = 200
RESERVE_BYTES = 64 * 1024
"""Size of a reserve file, whose deletion makes room for `summary.json` on a full disk."""
EVALUATIONS = "evaluations.jsonl"
OF_THE_END = ("summary.json", "report.html", "reward.png")
"""Files that describe a finished run. The next start of the run deletes these files, and its end writes new ones."""
SENT = ".commands"
"""Folder with a file for each command that the run's process has not taken yet."""
MAX_WAITING = 200
"""Files in that folder at which programs may not log more; the run takes the commands four times a second."""
logger = logging.getLogger(__name__)
_SAMPLES = re.compile(r"step-(\d+)\.jsonl\.zst$")


class RunDirectory:
    """The files of one run: `create` and `reopen` open them for writing, `open` for reading.

    Invariants:
    - The lock admits one writing process. Readers see whole documents and whole lines at any time.
    - A step may have several lines in `metrics.jsonl`. The transcripts of a step are one file of zstd frames.
    - While the run is written, a reserve of disk space is kept for the summary of a run that fills its disk.
    """

    def __init__(self, path: Path, redactor: Redactor | None = None, lock: WriterLock | None = None) -> None:
        self.path = path
        self.redactor = redactor or Redactor()
        self._lock = lock
        self._metrics: AppendOnlyFile | None = None
        self._samples: tuple[int, AppendOnlyFile] | None = None
        self._unsynced: set[Path] = set()
        """Files with data appended since the last `sync`."""

    @classmethod
    def create(
        cls,
        path: Path | None,
        base_name: str,
        now: datetime,
        random: Random,
        *,
        root: Path | None = None,
        redactor: Redactor | None = None,
    ) -> Self:
        """Create a run directory at `path`, which must be empty or missing, or under a new name in `root`."""
        root = root or runs_root()
        chosen = _claim(path) if path is not None else _fresh(root, base_name, now, random)
        with disk_errors(chosen):
            for name in ("samples", "logs", "checkpoints"):
                (chosen / name).mkdir()
            _reserve(chosen)
            for folder in (chosen.parent, chosen.parent.parent):  # the parents may be new too
                sync_to_disk(folder)
        latest, draft = root / "latest", root / f".latest.{os.getpid()}"
        is_users = latest.exists() and not latest.is_symlink()
        if (path is None or root.is_dir()) and not is_users:
            try:
                draft.symlink_to(os.path.relpath(chosen, root.resolve()))
                draft.replace(latest)
            except OSError:  # links are not supported
                draft.unlink(missing_ok=True)
        return cls(chosen, redactor, WriterLock(chosen / ".lock"))

    @classmethod
    def reopen(cls, path: Path, *, redactor: Redactor | None = None) -> Self:
        """Open an existing run for writing, and remove the records of its end and its open commands.

        Raises ConfigError while another process writes the run.
        """
        run = cls(cls.open(path).path, redactor, WriterLock(path / ".lock"))
        with disk_errors(run.path):
            _reserve(run.path)
            starting = {"run_id": run.name, "state": "starting"}
            run.write("status", status_document((), time.monotonic(), time.time(), starting))
            for name in OF_THE_END:
                (run.path / name).unlink(missing_ok=True)
            run.take_commands()
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing run for reading."""
        if not (path / "config.toml").is_file():
            raise ConfigError("run", path, "name a run directory, which contains config.toml; see `relax runs`")
        return cls(path.resolve())

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def write_config(self, toml: str) -> None:
        """Write the resolved configuration; its secrets are references, and stray secret values are redacted."""
        text = toml if toml.startswith("# schema") else f"# schema: relax.config/1\n{toml}"
        write_text(self.path / "config.toml", self.redactor.known(text))

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a document: plugins, provenance, status, summary or trace."""
        path, schema = self.path / f"{name}.json", f"relax.{name}/1"
        # A trace is large and needs no redaction; the remaining documents may quote texts of people and plugins.
        clean = (
            values if name == "trace" else self.redactor.document({key: plain(value) for key, value in values.items()})
        )
        try:
            # The status is written often and is useless after a power failure.
            write_document(path, schema, clean, durable=name != "status")
        except DiskFull:
            if name != "summary" or not (self.path / ".reserve").exists():
                raise
            (self.path / ".reserve").unlink()
            write_document(path, schema, clean)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a document, or None before it is first written."""
        return read_document(self.path / f"{name}.json")

    def append_metrics(self, step: int, time: float, metrics: Mapping[str, float], **more: float | str) -> None:
        """Append one flat JSON line: schema, step, time, the keys of `more`, then the metrics."""
        if self._metrics is None:
            self._metrics = AppendOnlyFile(self.path / "metrics.jsonl", whole_lines)
        record = {"schema": "relax.metrics/1", "step": step, "time": time, **more, **metrics}
        self._unsynced.add(self._metrics.path)
        self._metrics.append((self.redactor.known(encode(record)) + "\n").encode())

    def metrics(self) -> Iterable[dict[str, Any]]:
        """Yield the lines of `metrics.jsonl` as written; several lines may share a step."""
        return read_lines(self.path / "metrics.jsonl")

    def events(self) -> Iterable[dict[str, object]]:
        """Yield the records of `events.jsonl` in the order of their writing."""
        return read_lines(self.path / EVENTS)

    def append_evaluation(
        self, step: int, set_name: str, temperature: float, tasks: Mapping[str, Sequence[float]]
    ) -> None:
        """Append the rewards of an evaluation by task as one line of `evaluations.jsonl`."""
        record = {"schema": "relax.evaluation/1", "step": step, "set": set_name, "temperature": temperature}
        file = AppendOnlyFile(self.path / EVALUATIONS, whole_lines)
        self._unsynced.add(file.path)
        try:
            file.append((encode({**record, "tasks": tasks}) + "\n").encode())
        finally:
            file.close()

    def evaluations(self) -> Iterable[dict[str, Any]]:
        """Yield the lines of `evaluations.jsonl` as written; an evaluation that was repeated has several lines."""
        return read_lines(self.path / EVALUATIONS)

    def append_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append transcripts of a step as one zstd frame."""
        if not samples:
            return
        if self._samples is None or self._samples[0] != step:
            self._close_samples()
            self._samples = step, AppendOnlyFile(self.samples_path(step), whole_frames)
        self._unsynced.add(self._samples[1].path)
        lines = [encode({"schema": "relax.sample/1", "step": step, **sample}) for sample in samples]
        self._samples[1].append(frame(self.redactor.known(line) for line in lines))

    def samples(self, step: int) -> Iterable[dict[str, object]]:
        """Yield the transcripts of a step."""
        return read_frames(self.samples_path(step))

    def samples_path(self, step: int) -> Path:
        return self.path / "samples" / f"step-{step:06d}.jsonl.zst"

    def sample_steps(self) -> list[int]:
        """Return the steps that have transcripts, in order."""
        matches = (_SAMPLES.search(path.name) for path in (self.path / "samples").glob("step-*.jsonl.zst"))
        return sorted(int(match.group(1)) for match in matches if match)

    def rewind(self, step: int, in_place: bool = False) -> None:
        """Delete metrics, evaluations and transcripts of steps after `step`, the checkpoint to which the run goes back.

        `in_place`: rows sampled with the weights of `step` stay on the bus and are trained again. Their transcripts
        stay, too; they are filed under `step + 1`.
        """
        self._close_files()
        with disk_errors(self.path):
            for later in (found for found in self.sample_steps() if found > step):
                sampled = [one for one in self.samples(later) if one.get("purpose") != "eval"]
                if in_place and later == step + 1 and sampled:
                    write_bytes(self.samples_path(later), frame(encode(one) for one in sampled))
                else:
                    self.samples_path(later).unlink()
        for path, records in (
            (self.path / "metrics.jsonl", self.metrics()),
            (self.path / EVALUATIONS, self.evaluations()),
        ):
            if path.exists():
                kept = (encode(record) + "\n" for record in records if record.get("step", 0) <= step)
                write_bytes(path, "".join(kept).encode())

    def save_evidence(
        self, step: int, guard: str, evidence: Mapping[str, Any], groups: Iterable[int], first_step: int
    ) -> Path:
        """Save a guard's evidence, the configuration and the samples of `groups` in a new folder; return the folder.

        Samples filed before `first_step`, the start of the stage, are not searched. Earlier evidence for the same step
        and guard is kept; it is from a step that a rollback has undone.
        """
        root = self.path / "guards"
        with disk_errors(root):
            again = len(list(root.glob(f"step-{step:06d}-{guard}*")))
            folder = root / f"step-{step:06d}-{guard}{f'-{again + 1}' if again else ''}"
            folder.mkdir(parents=True)
            shutil.copyfile(self.path / "config.toml", folder / "config.toml")
        clean = self.redactor.document({key: plain(value) for key, value in evidence.items()})
        write_document(folder / "evidence.json", "relax.evidence/1", clean)
        wanted, missing, lines = set(groups), set(groups), list[str]()
        for saved_step in reversed([saved_step for saved_step in self.sample_steps() if saved_step >= first_step]):
            if not missing:
                break
            chosen = [sample for sample in self.samples(saved_step) if sample.get("group_id") in wanted]
            missing -= {sample["group_id"] for sample in chosen}
            lines += [encode(sample) for sample in chosen]
        write_bytes(folder / "samples.jsonl.zst", frame(lines))
        return folder

    def send(self, command: Command) -> None:
        """Send a command to the run's process from any process that can write the directory, on any machine."""
        folder = self.path / SENT
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        document = {"command": NAMES[type(command)], **asdict(command)}
        write_document(folder / f"{time.time_ns()}-{os.getpid()}.json", "relax.command/1", document)

    def waiting(self) -> int:
        """Return the number of commands that the run's process has not taken yet."""
        folder = self.path / SENT
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    def take_commands(self) -> list[Command]:
        """Return the commands in the order of their sending, and delete them. An invalid one is left out with a warning."""
        commands = []
        for path in sorted((self.path / SENT).glob("[!.]*.json")):
            try:
                fields = {**(read_document(path) or {})}
                fields.pop("schema", None)
                command = named_command(fields.pop("command"), **fields)
                checked(command, type(command), "command")
                commands.append(command)
            except (ConfigError, KeyError, TypeError, WrongShape) as error:
                logger.warning("a command to the run was ignored: %s: %s", path.name, error)
            with contextlib.suppress(OSError):
                path.unlink()
        return commands

    def sync(self) -> None:
        """Make appended data survive a crash of the machine; called when a checkpoint is complete."""
        with disk_errors(self.path):
            for path in (*sorted(self._unsynced), *sorted({path.parent for path in self._unsynced})):
                if path.exists():  # `rewind` may have deleted transcripts
                    sync_to_disk(path)
        self._unsynced.clear()

    def close(self) -> None:
        """Close the files, delete the reserve and release the lock, so that another process may write the run."""
        self._close_files()
        (self.path / ".reserve").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()

    def discard(self) -> None:
        """Delete the directory of a run that has not begun, so that its name is free again."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _close_samples(self) -> None:
        if self._samples is not None:
            self._samples[1].close()
            self._samples = None

    def _close_files(self) -> None:
        self._close_samples()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def runs_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory that contains runs: `$RELAX_RUNS`, else ./runs."""
    return Path(environ.get("RELAX_RUNS") or "runs")


def run_paths(root: Path) -> list[Path]:
    """Return the run directories under `root`, newest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if not path.is_symlink() and (path / "config.toml").is_file()]
    return sorted(found, key=lambda path: (path / "config.toml").stat().st_mtime, reverse=True)


def find_run(name: str | None, root: Path | None = None) -> Path:
    """Find a run by its path, its name under `root`, or the start of its name; without a name, find the latest run.

    Raises ConfigError if no run, or more than one, matches.
    """
    root = root or runs_root()
    if name is not None and (Path(name) / "config.toml").is_file():
        return Path(name).resolve()
    if ((root / (name or "latest")) / "config.toml").is_file():
        return (root / (name or "latest")).resolve()
    known = run_paths(root)
    matching = [path for path in known if name is None or path.name.startswith(name)]
    if name is None and matching:
        return matching[0].resolve()
    if len(matching) == 1:
        return matching[0].resolve()
    listed = ", ".join(path.name for path in known[:5]) or "none"
    raise ConfigError("run", name or "nothing", f"name a run directory, or a run under {root} (there: {listed})")


def refuse_while_written(path: Path) -> None:
    """Raise ConfigError if another process writes the run in this directory."""
    if (path / ".lock").exists():
        WriterLock(path / ".lock").release()


def _claim(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ConfigError("run_dir", path, "the path is a file; name a directory that is empty or does not exist")
    if path.is_dir() and any(path.iterdir()):
        fix = "name a new directory"
        if any((path / "checkpoints").glob("step-*/state.json")):
            fix += f", or continue the run in it with `relax resume {path}`"
        elif (path / "config.toml").exists():
            refuse_while_written(path)
            fix += ", or remove it: the run in it ended before its first checkpoint"
        raise ConfigError("run_dir", f"{path}, which is not empty", fix)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # no run has begun, so there is none to resume
        raise ConfigError("run_dir", f"{path} ({error.strerror})", "name a folder that you can create") from error
    return path.resolve()


def _reserve(path: Path) -> None:
    # Random bytes, since a compressing file system stores zeros in no space.
    (path / ".reserve").write_bytes(os.urandom(RESERVE_BYTES))


def _fresh(root: Path, base_name: str, now: datetime, random: Random) -> Path:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", base_name).strip("-.") or "run"
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        for _ in range(TRIES):
            path = root / f"{stem}-{now:%Y%m%d}-{''.join(random.choices(LETTERS, k=3))}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path.resolve()
    raise InfrastructureError(f"{root}: no free name for {stem} after {TRIES} tries; choose one with --run-dir")
