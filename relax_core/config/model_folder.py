# SPDX-License-Identifier: Apache-2.0
"""Files that a configuration names, looked at before start: the model folder and the task files.

Only `config.json` and the headers of weights are read. What is in weights, tokenizer and tasks is for those who load them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from relax_core.api.errors import ConfigError
from relax_core.api.routing import Routing
from relax_core.api.task import MediaKind

if TYPE_CHECKING:
    from relax_core.config.run_config import RunConfig

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def file_errors(config: RunConfig, samples: bool) -> list[ConfigError]:
    """Everything that is missing or broken, and what a run that samples has too long for the model."""
    missing = [*_model_errors(config), *_critic_errors(config), *_data_errors(config)]
    return missing + [*_context_errors(config)] * samples


def model_context(folder: Path) -> int | None:
    """Longest sequence of the model; None where its `config.json` does not say or can't be read."""
    try:
        config = _read(folder)
    except (OSError, ValueError):
        return None
    for known in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            if isinstance(known.get(key), int):
                return int(known[key])
    return None


def routing(folder: Path) -> Routing | None:
    """How the model routes; None where it has no routers, or its `config.json` can't be read."""
    try:
        return Routing.of(_read(folder))
    except (OSError, ValueError):
        return None


def model_type(folder: Path) -> str:
    """As `config.json` names it; empty where it does not, or can't be read."""
    try:
        return str(_read(folder).get("model_type") or "")
    except (OSError, ValueError):
        return ""


def vocabulary_size(folder: Path) -> int | None:
    """Ids of the model, by its `config.json`; None where that does not say or can't be read."""
    try:
        config = _read(folder)
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def placeholders(folder: Path) -> dict[str, int]:
    """By kind of medium, the id of the tokens that hold its place; empty where `config.json` names none or can't be read."""
    try:
        config = _read(folder)
    except (OSError, ValueError):
        return {}
    part = config.get("thinker_config")
    known = part if isinstance(part, dict) else config
    ids = {kind: known.get(f"{kind}_token_id") for kind in get_args(MediaKind)}
    return {kind: number for kind, number in ids.items() if isinstance(number, int)}


def _model_errors(config: RunConfig) -> Iterator[ConfigError]:
    folder, key = config.model.path, "model.path"
    yield from folder_errors(folder, key)
    if not folder.is_dir():
        return
    home, field = (config.model.tokenizer, "model.tokenizer") if config.model.tokenizer else (folder, key)
    if not (home / "tokenizer.json").is_file():
        fix = "save it there with transformers, or name another folder as model.tokenizer"
        yield ConfigError(field, f"{home} without tokenizer.json", fix)


def _critic_errors(config: RunConfig) -> Iterator[ConfigError]:
    """A critic of its own reads the policy's tokens."""
    folder, key = config.critic.path, "critic.path"
    if folder is None:
        return
    missing = list(folder_errors(folder, key))
    yield from missing
    if missing or not (config.model.path / "config.json").is_file():
        return
    own, other = (_read(path).get("vocab_size") for path in (config.model.path, folder))
    if own != other:
        fix = f"the policy has {own}, and ids must mean the same to both: name a model with that vocabulary"
        yield ConfigError(key, f"{folder} with a vocabulary of {other}", fix)


def folder_errors(folder: Path, key: str) -> Iterator[ConfigError]:
    """What is missing or broken in a model's folder, by its configuration and weights."""
    if not folder.is_dir():
        what = "a file" if folder.exists() else "a folder that does not exist"
        yield ConfigError(key, f"{folder}, {what}", "name the folder of a Hugging Face model")
        return
    try:
        _read(folder)
    except FileNotFoundError:
        yield ConfigError(key, f"{folder} without config.json", "name the folder of a Hugging Face model")
    except (OSError, ValueError) as error:
        yield ConfigError(key, f"{folder / 'config.json'}, which can't be read: {error}", "download the model again")
    if not any(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern)):
        yield ConfigError(
            key, f"{folder} without weights", f"it needs {' or '.join(WEIGHTS)}: download the model again"
        )
    else:
        for file in sorted(folder.glob("*.safetensors")):
            if said := _damage(file):
                yield ConfigError(key, f"{file}, which {said}", "download the model again")


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


def _damage(file: Path) -> str:
    """What is wrong with a file of weights, by its header and its length alone; empty where nothing is."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length + 8 > size:
                return f"ends within its header: it has {size} bytes"
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"can't be read: {error}"
    whole = 8 + length + max(ends, default=0)
    return f"is cut short: it has {size} of {whole} bytes" if size < whole else ""


def _read(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("it is not a JSON object")
    return config
