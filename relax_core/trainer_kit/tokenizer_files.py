# SPDX-License-Identifier: Apache-2.0
"""The tokenizer and chat template that the run trained with, written to an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from relax_core.api import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_TEMPLATE, _SETTINGS = "chat_template.jinja", "tokenizer_config.json"


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
                chosen = Path(chosen).read_text(encoding="utf-8")
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
        """Copy the files to an export, with the template and the variables of the run."""
        for folder, names in ((self.tokenizer, TOKENIZER_FILES), (self.model, PROCESSOR_FILES)):
            for name in names:
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, directory / name)
        if self.template:
            (directory / "chat_template.json").unlink(missing_ok=True)
            self._set_settings(directory, None)
            (directory / _TEMPLATE).write_text(self.defaults + self.template, encoding="utf-8")
        elif self.defaults and (directory / _TEMPLATE).is_file():
            text = (directory / _TEMPLATE).read_text(encoding="utf-8")
            (directory / _TEMPLATE).write_text(self._with_defaults(text), encoding="utf-8")
        elif self.defaults and (directory / _SETTINGS).is_file():
            own = json.loads((directory / _SETTINGS).read_text(encoding="utf-8")).get("chat_template")
            if isinstance(own, list):
                named = [{**one, "template": self._with_defaults(one["template"])} for one in own]
                self._set_settings(directory, named)
            elif isinstance(own, str):
                self._set_settings(directory, self._with_defaults(own))

    def _with_defaults(self, text: str) -> str:
        return text if text.startswith(self.defaults) else self.defaults + text

    def _set_settings(self, directory: Path, template: Any) -> None:
        """Replace the template in the tokenizer's settings; None removes it."""
        file = directory / _SETTINGS
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if settings.pop("chat_template", None) is None and template is None:
            return
        if template is not None:
            settings["chat_template"] = template
        file.write_text(json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8")
