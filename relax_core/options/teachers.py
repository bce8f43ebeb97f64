# SPDX-License-Identifier: Apache-2.0
"""`[[teachers]]`: models that a policy learns from, each for its own tasks; and what is wrong with them, found before start.

Only files are looked at here: folders, vocabularies and tokenizers. Which teacher a task has is `rollout.teaching`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from pydantic import Field

from relax_core.api.algorithm import Algorithm
from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.options.model_folder import folder_errors, vocabulary_size

if TYPE_CHECKING:
    from relax_core.options.run_config import RunConfig
    from relax_core.plugins.catalogue import Catalogue

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
