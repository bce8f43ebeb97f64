# SPDX-License-Identifier: Apache-2.0
"""Checks of the files that a configuration names, made before start: models, critic, teachers, pools, tasks, interpreters.

Only folders, vocabularies and tokenizers are looked at. Which teacher a task has is decided where rows are scored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from relax_core.api.algorithm import Algorithm
from relax_core.api.errors import ConfigError
from relax_core.config.checks import samples
from relax_core.config.model_folder import folder_errors, model_context, vocabulary_size
from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue

TEACHER_COLUMNS = frozenset(
    {"teacher_log_probs", "teacher_top_k_ids", "teacher_top_k_log_probs", "teacher_log_probs_at", "student_top_k_ids"}
)
"""Columns that nobody fills without a teacher."""


def file_errors(config: RunConfig, catalogue: Catalogue) -> list[ConfigError]:
    """Find everything that is missing or broken, and what a run that samples has too long for the model."""
    own = config.critic.path  # a critic of its own reads the policy's tokens
    critic = _other_vocabulary(config, own, "critic.path", "name a model with that vocabulary") if own else ()
    return [
        *_model_errors(config),
        *critic,
        *_data_errors(config),
        *(_context_errors(config) if samples(config, catalogue) else ()),
        *_pool_errors(config),
        *_teacher_errors(config, catalogue),
    ]


def _model_errors(config: RunConfig) -> Iterator[ConfigError]:
    folder, key = config.model.path, "model.path"
    yield from folder_errors(folder, key)
    if not folder.is_dir():
        return
    home, field = (config.model.tokenizer, "model.tokenizer") if config.model.tokenizer else (folder, key)
    if not (home / "tokenizer.json").is_file():
        fix = "save it there with transformers, or name another folder as model.tokenizer"
        yield ConfigError(field, f"{home} without tokenizer.json", fix)


def _context_errors(config: RunConfig) -> Iterator[ConfigError]:
    context = model_context(config.model.path)
    if context is None:
        return
    new, prompt, budget = config.rollout.max_new_tokens, config.data.max_prompt_tokens, config.rollout.token_budget
    holds = f"the model's context is {context} tokens"
    if prompt is not None and new + prompt > context:
        got = f"{new}, with data.max_prompt_tokens = {prompt} together {new + prompt}"
        yield ConfigError("rollout.max_new_tokens", got, f"{holds}: lower one of them")
    elif new >= context:
        yield ConfigError("rollout.max_new_tokens", new, f"{holds}, and a prompt needs some of them: set less")
    if budget is not None and budget > context:
        yield ConfigError("rollout.token_budget", budget, f"{holds}: set {context} or less")


def _data_errors(config: RunConfig) -> Iterator[ConfigError]:
    named = [("data.train", config.data.train)]
    named += [(f"eval.sets.{index}.path", known.path) for index, known in enumerate(config.eval.sets)]
    for key, path in named:
        if not path.exists():
            yield ConfigError(key, f"{path}, which does not exist", "name a task file")
    for key, choice in (("engine.python", config.engine), ("trainer.python", config.trainer)):
        if choice.python and not Path(choice.python).is_file():
            yield ConfigError(key, f"{choice.python}, which does not exist", "name a Python interpreter")


def _pool_errors(config: RunConfig) -> Iterator[ConfigError]:
    """Find folders and interpreters that are missing or broken, and contexts that the model does not have."""
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


def _teacher_errors(config: RunConfig, catalogue: Catalogue) -> Iterator[ConfigError]:
    """Refuse teachers that can't teach this policy; say nothing of teachers that the algorithm does not ask."""
    if not config.teachers:
        return
    algorithm = cast(Algorithm, catalogue.build(config.learner))
    if not any(column.name in TEACHER_COLUMNS for column in algorithm.columns() | algorithm.advantage_columns()):
        return
    home = config.model.tokenizer or config.model.path
    for at, teacher in enumerate(config.teachers):
        key = f"teachers.{at}.{'engine' if teacher.engine else 'path'}"
        pool = config.pool(teacher.engine) if teacher.engine else None
        folder = pool.path if pool else teacher.path
        if folder is None:
            continue
        wrong = list(_other_vocabulary(config, folder, key, "name a teacher with that vocabulary"))
        yield from wrong
        if wrong or not (config.model.path / "config.json").is_file():
            continue
        if not (folder / "tokenizer.json").is_file():
            fix = f"save the tokenizer it was trained with there, so that it can be compared with that of {home}"
            yield ConfigError(key, f"{folder} without tokenizer.json", fix)
        elif (home / "tokenizer.json").is_file() and (said := _difference(home, folder)):
            fix = f"ids must mean the same to both: name a teacher with the tokenizer of {home}"
            yield ConfigError(key, f"{folder}, whose tokenizer {said}", fix)


def _other_vocabulary(config: RunConfig, folder: Path, key: str, fix: str) -> Iterator[ConfigError]:
    """Look at the folder itself first, then at the size of its vocabulary beside the policy's."""
    missing = list(folder_errors(folder, key))
    yield from missing
    if missing or not (config.model.path / "config.json").is_file():
        return
    own, other = vocabulary_size(config.model.path), vocabulary_size(folder)
    if own != other:
        fix = f"the policy has {own}, and ids must mean the same to both: {fix}"
        yield ConfigError(key, f"{folder} with a vocabulary of {other}", fix)


def _difference(one: Path, other: Path) -> str:
    """Say in words which token is the first whose id differs; empty where all ids mean the same."""
    mine, theirs = _tokens(one), _tokens(other)
    for token in sorted(mine.keys() | theirs.keys()):
        if mine.get(token) != theirs.get(token):
            return f"has {theirs.get(token)} for {token!r} instead of {mine.get(token)}"
    return ""


def _tokens(folder: Path) -> dict[str, int]:
    """Read every token and its id."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram: [token, score] in order of ids
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    return {**{str(token): int(index) for token, index in vocabulary.items()}, **added}
