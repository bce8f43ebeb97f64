"""The model family `{{ cookiecutter.name }}`: writes a chat as `<|im_start|>role`, a line break, the text and `<|im_end|>`.

Text is tokenized once. `start` renders the first prompt; `delta` renders only what follows the policy's turn. Sampled
tokens are never encoded again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.api import ConfigError, Message, ModelFamily, Options, Rendered, Tool

BEGIN, END = "<|im_start|>", "<|im_end|>"


class {{ cookiecutter.class_name }}(ModelFamily[Options]):
    """A family whose chat format is code instead of a Jinja template. It has no tools and no media."""

    def open(self, model: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer

        folder = Path(model["path"])
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError("model.path", str(folder), "name a model folder with tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.encode_special_tokens = True  # a user who writes `<|im_end|>` ends no turn
        marks = {mark: self._tokenizer.token_to_id(mark) for mark in (BEGIN, END)}
        if None in marks.values():
            fix = f"choose a model whose tokenizer has {BEGIN} and {END}"
            raise ConfigError("model.path", str(folder), fix)
        self._begin, self._end = marks[BEGIN], marks[END]
        self._vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])

    def start(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        """Return the first prompt's ids, up to the policy's turn. A string is tokenized without a chat format."""
        if tools:
            raise ConfigError("family", f"{len(tools)} tools", "choose the family `chat`: this one cannot show tools")
        return Rendered(self.encode(prompt) if isinstance(prompt, str) else (*self._turns(prompt), *self._opening()))

    def delta(self, before: Sequence[Message], appended: Sequence[Message], last_token: int | None = None) -> Rendered:
        """Return the ids between the policy's last sampled token and its next turn."""
        ended = last_token is None or last_token == self._end
        end = () if ended else (self._end,)
        return Rendered((*end, *self.encode("\n"), *self._turns(appended), *self._opening()))

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (self._end,)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def _turns(self, messages: Sequence[Message]) -> tuple[int, ...]:
        line = self.encode("\n")
        turns = [(self._begin, *self.encode(f"{one.role}\n{one.text}"), self._end, *line) for one in messages]
        return tuple(token for turn in turns for token in turn)

    def _opening(self) -> tuple[int, ...]:
        return (self._begin, *self.encode("assistant\n"))
