# SPDX-License-Identifier: Apache-2.0
"""The content of a run's task files and chat template, as sizes and hashes in `data.json` of the run directory.

Tasks are known by number. If rows of a file are replaced, the same numbers mean other tasks, so a resume refuses it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.config.run_config import RunConfig
from relax_core.config.tables import EvalTable
from relax_core.data.tasks import stored_hold_out

NAME = "data"
PART_BYTES = 1 << 20
MAX_PARTS = 1024
"""Most parts of a file that are hashed: a file above 1 GiB is known by its size and as many parts, evenly spread."""


def data_paths(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield the key and the path of each task file or folder of a configuration, and of its chat template."""
    yield "data.train", config.data.train
    for at, table in enumerate(config.eval.sets):
        yield f"eval.sets.{at}.path", table.path
    if os.path.isfile(config.model.chat_template):  # else the template itself, or none
        yield "model.chat_template", Path(config.model.chat_template)


def content_of(path: Path) -> dict[str, object]:
    """Return the size in bytes and the hash of a file, or of all files of a folder with their names."""
    files = [path]
    if path.is_dir():  # without the caches that `datasets` writes when it reads a folder
        found = (file for file in path.rglob("*") if not file.name.startswith(("cache-", ".")))
        files = sorted(file for file in found if file.is_file())
    digest, size = hashlib.blake2b(digest_size=16), 0
    for file in files:
        length = file.stat().st_size
        size += length
        digest.update(json.dumps([str(file.relative_to(path)), length]).encode())
        _add(digest, file, length)
    return {"size_bytes": size, "digest": digest.hexdigest()}


def check_unchanged(config: RunConfig, known: Mapping[str, Any], run_dir: Path) -> dict[str, object]:
    """Return the content of each task file by path, as in `known` or read now for a new path.

    Raises ConfigError for a file whose content differs from `known`.
    """
    found = {}
    for key, path in data_paths(config):
        try:
            now = content_of(path)
        except OSError as error:
            fix = "put the file back, or name another run"
            raise ConfigError(key, f"{path}: {error.strerror or error}", fix) from error
        before = found[str(path)] = known.get(str(path), now)
        if before != now:
            got = (
                f"{path}, which has changed since the run began ({before['size_bytes']} bytes, now {now['size_bytes']})"
            )
            fix = (f"put the old file back, start a new run (model.path={run_dir}/export once this run has finished), or "
                   f"remove {run_dir}/{NAME}.json to train the rest of this run with the new content")  # fmt: skip
            raise ConfigError(key, got, fix)
    return found


def held_out_before(run_dir: Path, former: EvalTable, present: EvalTable) -> int | None:
    """Return the number of tasks that a run held out when it began; the rest of the run does not train them either.

    None: a share of the tasks, which the run has not drawn. `former`: the table of the run's last start, for a run of an
    earlier version, which stored nothing. Raises ConfigError if `present` holds out other tasks, of which the run may have
    trained some.
    """
    stored = stored_hold_out(run_dir)
    size = former.num_held_out if stored is None else stored.size
    if present.num_held_out not in (0, size, None if size else 0):
        fix = f"eval.size = {size}, " if size else ""
        asked = present.num_held_out or "a tenth of the"
        got = f"{asked} tasks to hold out of data.train, but the run began with {size}"
        raise ConfigError("eval.size", got, f"set {fix}eval.every = 0, or name other files as [[eval.sets]]")
    return size


def _add(digest: Any, file: Path, length: int) -> None:
    """Add the content of a file to a hash: all of it, or `MAX_PARTS` parts, the first and the last included."""
    parts = -(-length // PART_BYTES)
    count = min(parts, MAX_PARTS)
    with file.open("rb") as opened:
        for number in range(count):
            opened.seek(number * (parts - 1) // max(count - 1, 1) * PART_BYTES)
            digest.update(opened.read(PART_BYTES))
