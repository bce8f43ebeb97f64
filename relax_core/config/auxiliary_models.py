# SPDX-License-Identifier: Apache-2.0
"""`[[teachers]]`: models that a policy learns from, each for its own tasks; and what is wrong with them, found before start.

Only files are looked at here: folders, vocabularies and tokenizers. Which teacher a task has is `rollout.teaching`'s.

`[[engines]]`: pools beside the policy's, each of one model that is never updated; and what is wrong with their folders.

Judges and teachers are asked through them. Who asks which pool, and what engines can do, the planner looks at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.algorithm import Algorithm
from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.config.annotation import PathOrText
from relax_core.config.model_folder import folder_errors, model_context, vocabulary_size

if TYPE_CHECKING:
    from relax_core.config.run_config import RunConfig
    from relax_core.registry.catalogue import Catalogue


COLUMNS = frozenset(
    {"teacher_log_probs", "teacher_top_k_ids", "teacher_top_k_log_probs", "teacher_log_probs_at", "student_top_k_ids"}
)
"""Columns that nobody fills without a teacher."""


class TeacherTable(Options):
    """Models that the policy learns from, where the algorithm asks for a teacher; each task has exactly one."""

    path: Path | None = None
    """Folder of a Hugging Face model with the policy's tokenizer, which a trainer runs forward."""
    engine: str = ""
    """Instead of a folder: the pool of `[[engines]]` that scores the rows. It gives log-probs of the tokens that the policy
    sampled, and no others."""
    only: str = Field("", pattern=r"^$|^[^=]+=")
    """Teaches only tasks in which a column has this value, `domain=maths`; a dot goes into a table of the column. Empty:
    all tasks."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Number format of its weights; empty: that of `model.dtype`. A pool has its own."""


def asks_for_teacher(config: RunConfig, catalogue: Catalogue) -> bool:
    """Whether the algorithm, as it is set, reads what only a teacher gives."""
    algorithm = cast(Algorithm, catalogue.build(config.learner))
    return any(column.name in COLUMNS for column in algorithm.columns() | algorithm.advantage_columns())


def teacher_errors(config: RunConfig, catalogue: Catalogue) -> list[ConfigError]:
    """Teachers that can't teach this policy; of teachers that nobody asks nothing is said."""
    if not config.teachers or not asks_for_teacher(config, catalogue):
        return []
    return [
        error
        for at, teacher in enumerate(config.teachers)
        if (folder := teacher_folder(config, teacher)) is not None
        for error in _errors(config, f"teachers.{at}.{'engine' if teacher.engine else 'path'}", folder)
    ]


def teacher_folder(config: RunConfig, teacher: TeacherTable) -> Path | None:
    """Of its model; None where it names a pool that is not there."""
    pool = config.pool(teacher.engine) if teacher.engine else None
    return pool.path if pool else teacher.path


def _errors(config: RunConfig, key: str, folder: Path) -> Iterator[ConfigError]:
    """First the folder itself, then whether it speaks the policy's language."""
    missing = list(folder_errors(folder, key))
    yield from missing
    if missing or not (config.model.path / "config.json").is_file():
        return
    own, other = vocabulary_size(config.model.path), vocabulary_size(folder)
    if own != other:
        fix = f"the policy has {own}, and ids must mean the same to both: name a teacher with that vocabulary"
        yield ConfigError(key, f"{folder} with a vocabulary of {other}", fix)
        return
    home = config.model.tokenizer or config.model.path
    if not (folder / "tokenizer.json").is_file():
        fix = f"save the tokenizer it was trained with there, so that it can be compared with that of {home}"
        yield ConfigError(key, f"{folder} without tokenizer.json", fix)
    elif (home / "tokenizer.json").is_file() and (said := _difference(home, folder)):
        fix = f"ids must mean the same to both: name a teacher with the tokenizer of {home}"
        yield ConfigError(key, f"{folder}, whose tokenizer {said}", fix)


def _difference(one: Path, other: Path) -> str:
    """In words, the first token whose id differs; empty where all ids mean the same."""
    mine, theirs = _tokens(one), _tokens(other)
    for token in sorted(mine.keys() | theirs.keys()):
        if mine.get(token) != theirs.get(token):
            return f"has {theirs.get(token)} for {token!r} instead of {mine.get(token)}"
    return ""


def _tokens(folder: Path) -> dict[str, int]:
    """Every token and its id."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram: [token, score] in order of ids
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    return {**{str(token): int(index) for token, index in vocabulary.items()}, **added}


class EngineTable(Options):
    """Engines beside the policy's, for rewards, environments and teachers that ask another model."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """What rewards, environments and teachers call it, such as `judge`."""
    path: Path
    """Folder of its Hugging Face model; the weights stay as they are there."""
    engine: dict[str, Any] = {}
    """Engine: a name, or a table with a name, `python` and its options. Empty: as `[engine]` says."""
    count: PositiveInt = 1
    """Engine processes, on devices of their own."""
    max_context: NonNegativeInt = 0
    """Most tokens of prompt and completion together; 0: the model's context."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Number format of its weights; empty: that of `model.dtype`."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one request, from when it is asked; who asks may set a shorter one."""
    tokenizer: Path | None = None
    """Folder of another tokenizer; absent: the model's own."""
    chat_template: PathOrText = ""
    """File that holds a Jinja chat template, or the template itself; empty: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra variables of the chat template, such as `enable_thinking = false`."""
    gpus_per_engine: NonNegativeFloat | None = None
    """Devices of one engine; 0: none; absent: 1 where there are any."""
    threads: NonNegativeInt = 0
    """CPU threads of one engine; 0: an equal share of the cores."""
    requests_per_engine: PositiveInt = 256
    """Requests that one engine is given at once; others wait for the first engine that has room."""
    silence_s: PositiveFloat = 20.0
    """An engine that does not answer for so long is asked whether it lives; one that does not say so in as long is replaced."""


def pool_file_errors(config: RunConfig) -> Iterator[ConfigError]:
    """Folders and interpreters that are missing or broken, and contexts that the model does not have."""
    for at, pool in enumerate(config.engines):
        key = f"engines.{at}"
        yield from folder_errors(pool.path, f"{key}.path")
        python = config.backend_of(pool).python
        if pool.engine and python and not Path(python).is_file():
            yield ConfigError(f"{key}.engine.python", f"{python}, which does not exist", "name a Python interpreter")
        if pool.tokenizer is not None and not (pool.tokenizer / "tokenizer.json").is_file():
            yield ConfigError(f"{key}.tokenizer", f"{pool.tokenizer} without tokenizer.json", "save it there")
        context = model_context(pool.path)
        if context is not None and pool.max_context > context:
            fix = f"the model of the pool has a context of {context} tokens: set that or less"
            yield ConfigError(f"{key}.max_context", pool.max_context, fix)


def pool_errors(config: RunConfig, catalogue: Catalogue) -> Iterator[ConfigError]:
    """Two pools of one name, and teachers with no model or with two."""
    names = [pool.name for pool in config.engines]
    for at, name in enumerate(names):
        if name in names[:at]:
            yield ConfigError(f"engines.{at}.name", name, "pools are found by their names: give each its own")
    for at, teacher in enumerate(config.teachers):
        key = f"teachers.{at}"
        if not teacher.engine and teacher.path is None:
            yield ConfigError(key, "neither path nor engine", 'write path = "FOLDER", or engine = "POOL"')
        if teacher.engine and teacher.path is not None:
            yield ConfigError(f"{key}.path", f"{teacher.path} beside engine = {teacher.engine!r}", "keep one of them")
        if teacher.engine and teacher.dtype:
            yield ConfigError(f"{key}.dtype", teacher.dtype, f"write it in the pool {teacher.engine} of [[engines]]")
        if teacher.engine and teacher.engine not in names:
            yield ConfigError(f"{key}.engine", repr(teacher.engine), no_pool(config))


def no_pool(config: RunConfig) -> str:
    """What to do about a pool that is named and not there."""
    names = ", ".join(pool.name for pool in config.engines)
    return f"the pools of [[engines]] are {names}" if names else "add it: [[engines]] with name and path"
