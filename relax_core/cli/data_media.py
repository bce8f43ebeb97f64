# SPDX-License-Identifier: Apache-2.0
"""The media of task files as `relax data` sees them: decoded by the run's processors in killable processes, and not kept."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.api.media_source import shown
from relax_core.api.source import BadRow
from relax_core.api.task import Media, Task
from relax_core.api.trainer import Chosen
from relax_core.rollout.media import MediaDesk, MediaRefused, media_of

if TYPE_CHECKING:
    from relax_core.cli.data_files import DataFile, Survey

REMEMBERED = 1 << 14
"""Media whose facts are known: many rows may show the same."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor as a run without a configuration would choose it."""

    chosen: Chosen
    name: str
    timeout_s: float = 30.0
    memory_mb: int = 4096
    max_mb: int = 256
    preview_kb: int = 0


@dataclass(frozen=True, slots=True)
class Processors:
    """What reads the media of a file."""

    choices: Sequence[Any]
    kinds: Sequence[str]
    model: dict[str, Any]
    family: ModelFamily
    plugin_files: Sequence[str] = ()


@asynccontextmanager
async def opened(processors: Processors, preview_kb: int = 0) -> AsyncIterator[MediaDesk]:
    """A desk over a store that nothing is put into."""
    from relax_core.runners.local.workers import LocalWorkers

    choices = [
        Processor(one.chosen, one.name, one.timeout_s, one.memory_mb, one.max_mb, preview_kb)
        for one in processors.choices
    ]
    workers = LocalWorkers(processors.plugin_files)
    with tempfile.TemporaryDirectory(prefix="relax-data-") as directory:
        desk = MediaDesk(choices, workers, directory, processors.model, processors.family)
        try:
            await desk.start()
            yield desk
        finally:
            await desk.stop()
            await workers.close()


async def survey_media(found: DataFile, result: Survey) -> None:
    """Decode all media of the usable rows; what can't be read becomes a bad row, and lengths count what media take."""
    processors = found.processors
    rows = {row: list(shown_by(found.source[row])) for row in sorted(result.rows)}
    if processors is None or not any(rows.values()):
        return
    known: OrderedDict[Media, dict[str, Any] | str] = OrderedDict()
    async with opened(processors) as desk:
        for row, media in rows.items():
            tokens = 0
            for number, one in enumerate(media, 1):
                told = known[one] if one in known else await _told(desk, one)
                known[one] = told
                if len(known) > REMEMBERED:
                    known.popitem(last=False)
                if isinstance(told, str):
                    result.refuse(row, bad(found.source.where(row), one, number, told))
                    break
                result.count_medium(one.kind, told)
                tokens += told["tokens"] - 1
            else:
                result.lengthen(row, tokens, found.limit, found.source.where(row), found.too_long)


async def facts(found: DataFile, task: Task) -> list[dict[str, Any]]:
    """Of each medium of a task: kind, source, what its header tells, tokens, key and a copy for people, or its `error`."""
    if found.processors is None:
        return []
    told = []
    async with opened(found.processors, preview_kb=2048) as desk:
        for media in shown_by(task):
            one = await _told(desk, media)
            told.append(
                {"kind": media.kind, "source": shown(media.source), **({"error": one} if isinstance(one, str) else one)}
            )
    return told


def shown_by(task: Task) -> Iterator[Media]:
    yield from () if isinstance(task.prompt, str) else media_of(task.prompt)


def bad(where: str, media: Media, number: int, reason: str) -> BadRow:
    """A row with a medium that can't be read."""
    what = f"{media.kind} {shown(media.source)}"
    return BadRow(where, f"{what}: {reason}", f"medium {number} of the prompt", _fix(reason))


def _fix(reason: str) -> str:
    if "No such file" in reason:
        return "paths are relative to the task file: correct it, or put the file there"
    if "fetched" in reason:
        return ""  # the reason says it
    if "longer than" in reason or "broke the process" in reason:
        return "leave the row out, or raise timeout_s or memory_mb of its processor"
    if "at most" in reason or "more than" in reason:
        return "shrink it, or raise the bound of its processor"
    return "replace the file, or leave the row out"


async def _told(desk: MediaDesk, media: Media) -> dict[str, Any] | str:
    try:
        return await desk.examine(media)
    except MediaRefused as refused:
        return str(refused)


def choices_for(names: Sequence[str], target: Any, wanted: Sequence[str]) -> tuple[list[Processor], list[str]]:
    """Processors with their defaults and the kinds that they read, of those kinds that are wanted."""
    made: dict[str, Processor] = {}
    for name in names:
        try:
            medium = str(target("modality-processor", name).medium)
        except (ImportError, ConfigError):
            continue  # it is installed without what it needs; a row that shows such media says so
        if medium in wanted and medium not in made:
            made[medium] = Processor(Chosen("modality-processor", name), name)
    return list(made.values()), list(made)
