# SPDX-License-Identifier: Apache-2.0
"""What a model folder says of its text: tokenizer, special tokens, chat templates and the ids that end a turn.

It reads `tokenizer.json` with the `tokenizers` library alone; neither transformers nor torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from relax_core.api.errors import ConfigError
from relax_core.options.model_folder import placeholders


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """The text side of one model."""

    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    """`tokenizer_config.json`."""
    special: Mapping[str, str]
    """Special tokens by the names that templates use: `bos_token`, `eos_token`, ..."""
    templates: Mapping[str, str]
    """Chat templates by name: `default`, and `tool_use` where the model has its own."""
    template_source: str
    """Where the templates came from, for messages to people."""
    end_ids: tuple[int, ...]
    """End-of-sequence ids of `generation_config.json`, else of `config.json`."""
    config: Mapping[str, Any]
    """`config.json`."""
    placeholders: Mapping[str, int]
    """By kind of medium, the id that `config.json` names for it."""

    @classmethod
    def read(cls, model: Mapping[str, Any]) -> ChatFiles:
        """Raises ConfigError naming the key of `[model]` whose folder or file is missing or broken."""
        folder = _folder("model.path", str(model.get("path") or ""))
        texts = _folder("model.tokenizer", str(model["tokenizer"])) if model.get("tokenizer") else folder
        settings, config = _json(texts / "tokenizer_config.json"), _json(folder / "config.json")
        templates, source = _templates(texts, settings, str(model.get("chat_template") or ""))
        return cls(
            tokenizer=_tokenizer(texts / "tokenizer.json"),
            settings=settings,
            special=_special(_json(texts / "special_tokens_map.json")) | _special(settings),
            templates=templates,
            template_source=source,
            end_ids=_end_ids(_json(folder / "generation_config.json")) or _end_ids(config),
            config=config,
            placeholders=placeholders(folder),
        )


def _folder(field: str, path: str) -> Path:
    folder = Path(path)
    if not path or not folder.is_dir():
        raise ConfigError(field, repr(path), "name a folder with a model in the Hugging Face layout")
    return folder


def _tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        fix = "write one with `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers"
        raise ConfigError("model.path", f"no {file.name} in {file.parent}", fix)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it can't read
        raise ConfigError(
            "model.path", f"{file}, which can't be read: {error}", "restore it from the model's source"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where the folder lacks the file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            "model.path", f"{file}, which can't be read: {error}", "restore it from the model's source"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("model.path", f"{file}: no JSON object", "restore the file from the model's source")
    return value


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """`*_token` entries, which are strings or objects with `content`."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _templates(folder: Path, settings: Mapping[str, Any], chosen: str) -> tuple[dict[str, str], str]:
    """Templates and where they are from: the configuration, then `chat_template.jinja`, then the tokenizer's."""
    if chosen:
        return _chosen(chosen)
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}, str(file)
    known = settings.get("chat_template")
    source = str(folder / "tokenizer_config.json")
    if isinstance(known, list):
        return {str(entry["name"]): str(entry["template"]) for entry in known}, source
    return ({"default": known} if isinstance(known, str) else {}), source


def _chosen(chosen: str) -> tuple[dict[str, str], str]:
    if "{" in chosen or "\n" in chosen:
        return {"default": chosen}, "[model] chat_template"
    try:
        return {"default": Path(chosen).read_text(encoding="utf-8")}, chosen
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "model.chat_template", chosen, "name a readable file, or write the template itself"
        ) from error


def _end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get("eos_token_id")
    if ids is None:
        ids = (config.get("text_config") or {}).get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)
