# SPDX-License-Identifier: Apache-2.0
"""The bundle of a run: its evidence for a bug report as one archive, without secrets and weights.

Files are read as they are, so the bundle of a live, killed or damaged run, or of one of another schema, is written too.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.api.options import revealed
from relax_core.runs import (
    Redactor,
    RunView,
    credentials,
    disk_errors,
    encode,
    frame,
    health,
    open_run,
    read_frames,
    to_toml,
    write_bytes,
)

EVIDENCE = (
    "config.toml", "*.json", "*.jsonl", ".epoch", "logs/*.log", "logs/*.jsonl", "guards/*/config.toml",
    "guards/*/evidence.json", "checkpoints/*/state.json", "checkpoints/*/files.json",
)  # fmt: skip
"""Patterns of the files in a bundle, in the run directory and in the directories of its stages."""
FAILING = "failing-sample.json"
SAMPLES = ("samples/*.jsonl.zst", "guards/*/samples.jsonl.zst")
"""Patterns of files with the text of samples, as `FAILING` has too."""
LARGEST = 16 * 2**20
"""Bytes of a file's text that are kept: the last ones, from a whole line on."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A written bundle."""

    file: Path
    files: list[str]
    """Names of the files in it, relative to the run directory."""
    problems: list[str]
    """Sentences about files that are missing, cut or not readable."""


def bundle(run: str | Path | None = None, out: str | Path | None = None, *, samples: bool = False) -> Path:
    """Do the work of `relax_core.bundle`: pack a run's evidence into one archive without secrets; return the archive."""
    return write_bundle(open_run(run), None if out is None else Path(out), samples).file


def write_bundle(run: RunView, out: Path | None = None, samples: bool = False) -> Bundle:
    """Write the evidence of a run to a gzipped tar file; `bundle.json` in it lists the problems.

    `out`: the file, which must be new; None: `<run>.bundle.tar.gz` in the working directory. `samples`: add the
    transcripts. Raises ConfigError, and InfrastructureError if the file can't be written.
    """
    out = (out or Path(f"{run.name}.bundle.tar.gz")).absolute()
    if out.exists():
        raise ConfigError("--out", f"{out}, which exists", "name a new file")
    redactor, problems, files = _redactor(run.path), [], []
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(f"{run.name}/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))

        for name in _names(run.path, samples):
            try:
                data, problem = _clean(run.path / name, redactor)
                add(name, data)
                files.append(name)
                problems += [f"{name}: {problem}"] if problem else []
            except (OSError, ValueError) as error:  # deleted by the live run, damaged, or not readable by this user
                problems.append(f"{name}: left out, because it can't be read ({error})")
        problems += [
            f"{name}: missing" for name in ("config.toml", "events.jsonl", "plugins.json") if name not in files
        ]
        try:
            state = health(run, time.time()).state
        except (ConfigError, TypeError, ValueError, LookupError, AttributeError) as error:
            state = "unknown"
            problems.append(redactor.text(f"state of the run: {error}"))
        about = {"schema": "relax.bundle/1", "run": run.name, "state": state, "files": files, "problems": problems}
        add("bundle.json", (encode(about) + "\n").encode())
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, packed.getvalue(), mode=0o600)  # the bundle has the run's logs, which only their owner can read
    return Bundle(out, files, problems)


def _names(path: Path, samples: bool) -> Iterator[str]:
    """Yield the names of the files to pack. Links are left out, since they may lead out of the run."""
    for folder in (path, *sorted(path.glob("stages/*"))):
        for pattern in (*EVIDENCE, *(SAMPLES if samples else ())):
            for file in sorted(folder.glob(pattern)):
                inside = not any(part.is_symlink() for part in (file, *file.parents) if part.is_relative_to(path))
                if file.is_file() and inside and (samples or file.name != FAILING):
                    yield str(file.relative_to(path))


def _redactor(path: Path) -> Redactor:
    """Return a redactor of the secrets that the run's configuration names and that this environment holds."""
    redactor = Redactor(credentials(os.environ))
    for source in (path / "config.toml", *path.glob("stages/*/config.toml")):
        with suppress(OSError, ValueError, RecursionError):
            redactor.add(revealed(tomllib.loads(source.read_text(encoding="utf-8"))))
    return redactor


def _clean(file: Path, redactor: Redactor) -> tuple[bytes, str]:
    """Return a file's content without secrets, and a problem or "". Text that does not parse is redacted as plain text."""
    if file.name.endswith(".jsonl.zst"):
        return frame(encode(redactor.value(sample)) for sample in read_frames(file)), ""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - LARGEST))
        text = opened.read(LARGEST).decode("utf-8", errors="backslashreplace")
    problem = ""
    if size > LARGEST:
        text = text.partition("\n")[2]
        problem = f"has {size} bytes, of which the last {len(text)} are kept"
    lines = io.StringIO(text) if file.suffix == ".jsonl" else [text]  # a secret in a log may have several lines
    clean = "".join(_redacted(line, file.suffix, redactor) for line in lines)
    return clean.encode(errors="backslashreplace"), problem


def _redacted(text: str, suffix: str, redactor: Redactor) -> str:
    with suppress(ValueError, RecursionError):
        if suffix == ".toml":
            schema = text.partition("\n")[0] + "\n" if text.startswith("# schema") else ""
            return schema + to_toml(redactor.document(tomllib.loads(text)))
        if suffix in (".json", ".jsonl"):
            value: Any = json.loads(text)
            return encode(redactor.value(value)) + "\n"
    return redactor.text(text)
