# SPDX-License-Identifier: Apache-2.0
"""The tokenizer and chat template that the run trained with, written to an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from relax_core.api import ConfigError
from relax_core.api.files import read_text

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_TEMPLATE, _SETTINGS, _OF_PROCESSOR = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
_NAMED = "additional_chat_templates"
"""Folder of a tokenizer's templates by name, such as `tool_use.jinja`."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of an export other than its weights."""

    model: Path
    """Folder of the model, which has the files of its processor."""
    tokenizer: Path
    """Folder of the tokenizer, by default that of the model."""
    template: str = ""
    """Text of the template that `[model] chat_template` names; empty: the tokenizer's own template."""
    defaults: str = ""
    """Beginning of every template: sets the variables of `[model] chat_template_kwargs` that a caller leaves out."""

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> Self:
        """Read a `[model]` table and the template's file. Raises ConfigError for a file that can't be read."""
        chosen = str(model.get("chat_template") or "")
        if chosen and "{" not in chosen and "\n" not in chosen:
            try:
                chosen = read_text(chosen)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError("model.chat_template", chosen, f"name a readable file ({error})") from error
        variables = dict(model.get("chat_template_kwargs") or {})
        defaults = "".join(
            f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"  # trimmed
            for name, value in variables.items()
        )
        folder = Path(str(model["path"]))
        return cls(folder, Path(str(model.get("tokenizer") or folder)), chosen, defaults)

    def write(self, directory: Path) -> None:
        """Copy the files to an export that has its other files, with the template and the variables of the run.

        The export needs no code of its own: Relax loads none of the model's, and copies none.
        """
        for folder, names in ((self.tokenizer, TOKENIZER_FILES), (self.model, PROCESSOR_FILES)):
            for name in names:
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, directory / name)
        for path in directory.glob("*config.json"):
            _change(path, _without_code)
        if self.template:
            (directory / _OF_PROCESSOR).unlink(missing_ok=True)
            _change(directory / _SETTINGS, lambda settings: {k: v for k, v in settings.items() if k != "chat_template"})
            (directory / _TEMPLATE).write_text(self.defaults + self.template, encoding="utf-8")
            return
        if (self.tokenizer / _NAMED).is_dir():
            shutil.copytree(self.tokenizer / _NAMED, directory / _NAMED)
        if self.defaults:
            for path in (directory / _TEMPLATE, *(directory / _NAMED).glob("*.jinja")):
                if path.is_file():
                    path.write_text(self._with_defaults(path.read_text(encoding="utf-8")), encoding="utf-8")
            for name in (_SETTINGS, _OF_PROCESSOR):
                _change(directory / name, self._settings_with_defaults)

    def _with_defaults(self, text: str) -> str:
        return text if text.startswith(self.defaults) else self.defaults + text

    def _settings_with_defaults(self, settings: dict[str, Any]) -> dict[str, object]:
        """Return settings whose template, or each template of a list, begins with the defaults."""
        own = settings.get("chat_template")
        if isinstance(own, str):
            return {**settings, "chat_template": self._with_defaults(own)}
        if isinstance(own, list):
            named = [{**one, "template": self._with_defaults(one["template"])} for one in own]
            return {**settings, "chat_template": named}
        return settings


def _change(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the JSON object of a file, if there is one, by what `change` returns; keep the bytes of an equal object."""
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if (changed := change(settings)) != settings:
        file.write_text(json.dumps(changed, ensure_ascii=False, indent=2), encoding="utf-8")


def _without_code(settings: Any) -> Any:
    """Return settings without `auto_map`, which names classes in Python files that an export does not have."""
    if isinstance(settings, list):
        return [_without_code(each) for each in settings]
    if not isinstance(settings, dict):
        return settings
    return {name: _without_code(value) for name, value in settings.items() if name != "auto_map"}
