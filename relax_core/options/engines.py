# SPDX-License-Identifier: Apache-2.0
"""`[[engines]]`: pools beside the policy's, each of one model that is never updated; and what is wrong with their folders.

Judges and teachers are asked through them. Who asks which pool, and what engines can do, the planner looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.options.annotation import PathOrText
from relax_core.options.model_folder import folder_errors, model_context

if TYPE_CHECKING:
    from relax_core.options.run_config import RunConfig
    from relax_core.plugins.catalogue import Catalogue


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
