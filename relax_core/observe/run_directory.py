# SPDX-License-Identifier: Apache-2.0
"""The run directory: where each file of a run is, made by one writer, rewound when the run resumes.

It knows names and safety (whole documents, append-only files, one writer, secrets left out), not the meaning of numbers:
the recorder fills it, `views` read it. Every JSON document and line carries `schema`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, Literal, Self, get_args

from relax_core.api.errors import ConfigError, DiskFull, InfrastructureError
from relax_core.observe.documents import (
    AppendOnlyFile,
    WriterLock,
    disk_errors,
    encode,
    frame,
    plain,
    read_document,
    read_frames,
    read_lines,
    rewrite_lines,
    status_document,
    sync_to_disk,
    whole_frames,
    whole_lines,
    write_bytes,
    write_document,
    write_text,
)
from relax_core.observe.logging import Redactor

LETTERS = "abcdefghijkmnopqrstuvwxyz"
TRIES = 200
RESERVE_BYTES = 64 * 1024
"""Kept aside so that a run that fills its disk can still write how it ended."""
Request = Literal["checkpoint", "continue", "stop"]
"""Questions to a run from outside, each a file made by whoever may write the run directory, which is all the permission
that it needs."""
_SAMPLES = re.compile(r"step-(\d+)\.jsonl\.zst$")


class RunDirectory:
    """One run's files. `create` and `reopen` write, `open` only reads.

    Invariants:
    - At most one process has it to write, by the lock; readers see whole documents and whole lines at any time.
    - Lines of one step of `metrics.jsonl` may be several; transcripts of a step are one file of zstd frames.
    - A reserve of disk space is kept while it is written, for the summary of a run that fills its disk.
    """

    def __init__(self, path: Path, redactor: Redactor | None = None, lock: WriterLock | None = None) -> None:
        self.path = path
        self.redactor = redactor or Redactor()
        self._lock = lock
        self._metrics: AppendOnlyFile | None = None
        self._samples: tuple[int, AppendOnlyFile] | None = None
        self._unsynced: set[Path] = set()
        """Files that were appended to since the last `sync`."""

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
        """A new, empty run directory; `path` or a fresh name under `root`."""
        root = root or runs_root()
        chosen = _claim(path) if path is not None else _fresh(root, base_name, now, random)
        with disk_errors(chosen):
            for name in ("samples", "logs", "checkpoints"):
                (chosen / name).mkdir()
            _reserve(chosen)
            for folder in (chosen.parent, chosen.parent.parent):  # they may be as new as the run
                sync_to_disk(folder)
        if path is None or root.is_dir():
            _point_latest(root, chosen)
        return cls(chosen, redactor, WriterLock(chosen / ".lock"))

    @classmethod
    def reopen(cls, path: Path, *, redactor: Redactor | None = None) -> Self:
        """An existing run, to write on: refused while another process does."""
        run = cls(cls.open(path).path, redactor, WriterLock(path / ".lock"))
        with disk_errors(run.path):
            _reserve(run.path)
            # It continues, so the record of its end no longer holds.
            starting = {"run_id": run.name, "state": "starting"}
            run.write("status", status_document((), time.monotonic(), time.time(), starting))
            (run.path / "summary.json").unlink(missing_ok=True)
            for request in get_args(Request):
                run.take_request(request)
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run, to read."""
        if not (path / "config.toml").is_file():
            raise ConfigError("run", path, "it must be a run directory, which holds config.toml; see `relax runs`")
        return cls(path.resolve())

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_config(self, toml: str) -> None:
        """The resolved configuration; secrets in it are references already, and are kept out here again."""
        text = toml if toml.startswith("# schema") else f"# schema: relax.config/1\n{toml}"
        write_text(self.path / "config.toml", self.redactor.known(text))

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """A document by its name: plugins, provenance, status, summary, trace."""
        path, schema = self.path / f"{name}.json", f"relax.{name}/1"
        # A trace is large and made by us; the others may quote what people and plugins wrote.
        clean = values if name == "trace" else self.redactor.value(plain(values))
        try:
            # The live status is written often, and worth nothing after a power cut.
            write_document(path, schema, clean, durable=name != "status")
        except DiskFull:
            if name != "summary" or not (self.path / ".reserve").exists():
                raise
            (self.path / ".reserve").unlink()
            write_document(path, schema, clean)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a document; None before it is first written."""
        return read_document(self.path / f"{name}.json")

    def append_metrics(self, step: int, time: float, metrics: Mapping[str, float], **more: float | str) -> None:
        """One flat line: schema, step, time, then the metrics."""
        if self._metrics is None:
            self._metrics = AppendOnlyFile(self.path / "metrics.jsonl", whole_lines)
        record = {"schema": "relax.metrics/1", "step": step, "time": time, **more, **metrics}
        self._unsynced.add(self._metrics.path)
        self._metrics.append((self.redactor.known(encode(record)) + "\n").encode())

    def metrics(self) -> Iterable[dict[str, Any]]:
        """The lines as they were written; several may share a step."""
        return read_lines(self.path / "metrics.jsonl")

    def append_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Transcripts of a step, as one zstd frame."""
        if not samples:
            return
        if self._samples is None or self._samples[0] != step:
            self._close_samples()
            self._samples = step, AppendOnlyFile(self.samples_path(step), whole_frames)
        self._unsynced.add(self._samples[1].path)
        lines = [encode({"schema": "relax.sample/1", "step": step, **sample}) for sample in samples]
        self._samples[1].append(frame(self.redactor.known(line) for line in lines))

    def samples(self, step: int) -> Iterable[dict[str, Any]]:
        """Transcripts of a step; none where it has none."""
        return read_frames(self.samples_path(step))

    def samples_path(self, step: int) -> Path:
        return self.path / "samples" / f"step-{step:06d}.jsonl.zst"

    def sample_steps(self) -> list[int]:
        """Steps that have transcripts."""
        found = (_SAMPLES.search(path.name) for path in (self.path / "samples").glob("step-*.jsonl.zst"))
        return sorted(int(match.group(1)) for match in found if match)

    def rewind(self, step: int, in_place: bool = False) -> None:
        """Forget metrics and transcripts of steps above a checkpoint that the run goes back to.

        `in_place`: rows that the weights of that step have sampled are trained again, so that their transcripts, which are of
        the step after it, stay.
        """
        self._close_files()
        with disk_errors(self.path):
            for later in (found for found in self.sample_steps() if found > step):
                sampled = [one for one in self.samples(later) if one.get("purpose") != "eval"]
                if in_place and later == step + 1 and sampled:
                    write_bytes(self.samples_path(later), frame(encode(one) for one in sampled))
                else:
                    self.samples_path(later).unlink()
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            rewrite_lines(metrics, lambda record: record.get("step", 0) <= step)

    def save_evidence(
        self, step: int, guard: str, evidence: Mapping[str, Any], groups: Iterable[int], first_step: int
    ) -> Path:
        """Save what a guard has found: its evidence, the configuration, and the samples of these groups, which were written
        at `first_step` or later. Evidence of the same step before it, which was undone, stays beside it."""
        root = self.path / "guards"
        with disk_errors(root):
            again = len(list(root.glob(f"step-{step:06d}-{guard}*")))
            folder = root / f"step-{step:06d}-{guard}{f'-{again + 1}' if again else ''}"
            folder.mkdir(parents=True)
            shutil.copyfile(self.path / "config.toml", folder / "config.toml")
        write_document(folder / "evidence.json", "relax.evidence/1", self.redactor.value(plain(evidence)))
        wanted, missing, lines = set(groups), set(groups), list[str]()
        for at in reversed([at for at in self.sample_steps() if at >= first_step]):
            if not missing:
                break
            found = [sample for sample in self.samples(at) if sample.get("group_id") in wanted]
            missing -= {sample["group_id"] for sample in found}
            lines += [encode(sample) for sample in found]
        write_bytes(folder / "samples.jsonl.zst", frame(lines))
        return folder

    def request(self, request: Request) -> None:
        """Ask the run's own process for something, from any other one, also on another machine."""
        with disk_errors(self.path):
            self._request_file(request).touch()

    def take_request(self, request: Request) -> bool:
        """Tell, once, that somebody has asked for it."""
        try:
            self._request_file(request).unlink()
        except OSError:  # there is none, or the file system is out of reach for now
            return False
        return True

    def is_requested(self, request: Request) -> bool:
        """Tell whether somebody has asked for this and nobody has taken it up."""
        return self._request_file(request).exists()

    def _request_file(self, request: Request) -> Path:
        return self.path / f".{request}-request"

    def sync(self) -> None:
        """Make what was appended survive a crash of the machine; called when a checkpoint is complete."""
        with disk_errors(self.path):
            for path in (*sorted(self._unsynced), *sorted({path.parent for path in self._unsynced})):
                if path.exists():  # transcripts of steps that were taken back are gone
                    sync_to_disk(path)
        self._unsynced.clear()

    def close(self) -> None:
        """Let another process write. The run's last words are written before."""
        self._close_files()
        (self.path / ".reserve").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()

    def discard(self) -> None:
        """Remove a directory in which no run has begun, so that its name is free again."""
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
    """Return the directory in which runs are kept: `$RELAX_RUNS`, else ./runs."""
    return Path(environ.get("RELAX_RUNS") or "runs")


def run_paths(root: Path) -> list[Path]:
    """Run directories under `root`, newest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if not path.is_symlink() and (path / "config.toml").is_file()]
    return sorted(found, key=lambda path: (path / "config.toml").stat().st_mtime, reverse=True)


def find_run(name: str | None, root: Path | None = None) -> Path:
    """A run by path, by name under `root`, by the start of its name; the latest without one."""
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
    """Raise ConfigError where another process writes the run in this directory."""
    if (path / ".lock").exists():
        WriterLock(path / ".lock").release()


def _claim(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ConfigError("run_dir", path, "it is a file; name a directory that is empty or does not exist")
    if path.is_dir() and any(path.iterdir()):
        fix = "name a new directory"
        if any((path / "checkpoints").glob("step-*/state.json")):
            fix += f", or continue the run in it with `relax resume {path}`"
        elif (path / "config.toml").exists():
            refuse_while_written(path)
            fix += ", or remove it: the run in it ended before its first checkpoint"
        raise ConfigError("run_dir", f"{path}, which is not empty", fix)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def _reserve(path: Path) -> None:
    # Random bytes: a compressing file system would give no room for zeros.
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


def _point_latest(root: Path, path: Path) -> None:
    """`latest` is a convenience: where it is somebody's file, or links are not supported, it is left out."""
    latest, draft = root / "latest", root / f".latest.{os.getpid()}"
    if latest.exists() and not latest.is_symlink():
        return
    try:
        draft.symlink_to(os.path.relpath(path, root.resolve()))
        draft.replace(latest)
    except OSError:
        draft.unlink(missing_ok=True)
