# SPDX-License-Identifier: Apache-2.0
"""The `chat` family: any model with a `tokenizer.json` and a chat template.

Text is tokenized once. `start` tokenizes the first prompt. `delta` tokenizes only the template's text between the
policy's last sampled token and its next turn. Sampled ids are therefore never decoded and tokenized again. A bare
string gets the beginning-of-sequence token that the model's tokenizer would add, and no further special token.

Some tokenizers, those of the sentencepiece kind, put a space before a text and drop the space when they decode. Only
`start` begins a text, so `encode` adds no such space and `decode` drops none.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.family import UNFINISHED, ModelFamily, Rendered
from relax_core.api.modality import PlaceholderSpan
from relax_core.api.model_folder import model_type, vocabulary_size
from relax_core.api.options import Options
from relax_core.api.task import Message, ToolCall, without_halves
from relax_core.media.placeholders import media_of
from relax_plugin_chat.chat_template import ChatFiles, ChatTemplate
from relax_plugin_chat.tool_calls import FIELD, FORMATS, CallFormat, call_format
from relax_plugin_chat.video_marks import PARTS, reader

PROMPT_END = 16
"""Number of final prompt tokens that are searched for the mark that opens a thought, such as `<think>`."""
TAIL = 64
"""Number of final characters of a prompt that are searched for an added token at the prompt's end."""


class ChatFamily(ModelFamily[Options]):
    """A model family that renders chats with the files of the model folder."""

    def open(self, model: Mapping[str, Any]) -> None:
        """Read the model folder. Templates that show the date get `chat_template_date`, or else the time of this call."""
        files = ChatFiles.read(model)
        self._tokenizer = files.tokenizer
        self._continuing, self._prefixes_all = continuing(files.tokenizer)
        variables = {**files.special, **(model.get("chat_template_kwargs") or {})}
        eos = files.tokenizer.token_to_id(files.special.get("eos_token", ""))
        self._added = added = files.tokenizer.get_added_tokens_decoder()
        self._specials = {number for number, token in added.items() if token.special}
        self._marks = {*added, *files.end_ids, *(() if eos is None else (eos,))}
        now = _date(model.get("chat_template_date"))
        shown = files.templates.get("tool_use", files.templates.get("default", ""))
        self._format = call_format(str(model.get("tool_calls") or "auto"), shown)
        self._source = files.template_source
        call_settings = (self._format.call_id, self._has_headers) if self._format else ()
        self._templates = {
            name: ChatTemplate(text, self._source, variables, now, *call_settings)
            for name, text in files.templates.items()
        }
        self._opening = _opening(files)
        self.placeholders = files.placeholders
        self._reader = reader(files.config, files.placeholders, self.encode)
        self._end_of_turn = self._find_end_of_turn(files)
        vocabulary = files.tokenizer.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        size = vocabulary_size(Path(str(model["path"]))) or self._vocab_size
        self.foreign_tokens = {number: text for text, number in vocabulary.items() if number >= size}
        self.misread_ends = self._read_otherwise(files, eos, added)
        ends = (self._end_of_turn, *files.end_ids, eos)
        self._stop = tuple(dict.fromkeys(number for number in ends if number is not None and number < size))
        marks = self._format.ends if self._format else ()
        self._turn_ends = {self._end_of_turn, *map(self._tokenizer.token_to_id, marks)}

    def start(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        if tools:
            self._call_format()  # raise now, not after sampling a turn with calls that can't be read
        if isinstance(prompt, str):
            ids = self._encode(prompt, begins=True)
            opened = ids[: len(self._opening)] == self._opening
            return Rendered(ids if opened else self._opening + ids)
        return Rendered(self._encode(self._template(tools).render(prompt, tools), begins=True), _media(prompt))

    def text(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the first prompt as text, for display."""
        return prompt if isinstance(prompt, str) else self._template(tools).render(prompt, tools)

    def delta(self, before: Sequence[Message], appended: Sequence[Message], last_token: int | None = None) -> Rendered:
        template = self._template_of((*before, *appended))
        ids = self.encode(template.after_turn(before, appended))
        if last_token is None or last_token in self._stop:
            # The policy sampled the end-of-turn token itself: drop it here, with the white space before it.
            at = self._first_mark(ids)
            if at is not None and (ids[at] == last_token or ids[at] in self._turn_ends):
                ids = ids[at + 1 :]
        return Rendered(ids, _media(appended))

    def expand(self, tokens: Sequence[int], layouts: Sequence[Sequence[PlaceholderSpan]]) -> tuple[int, ...]:
        if self._reader is None:
            return super().expand(tokens, layouts)
        return self._reader.expand(tokens, layouts, self.placeholders)

    def parts(self, model: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        return PARTS.get(model_type(Path(str(model.get("path") or ""))), {})

    def turn(self, before: str | Sequence[Message], message: Message) -> tuple[int, ...]:
        """Return the tokens of an assistant's message as the template writes the message after `before`.

        If `before` is a string or the template rewrites earlier turns, return the tokens of the plain text instead.
        """
        if isinstance(before, str):
            return self.ended(self._encode(message.text, self._begins_after(before)))
        said, is_written, opened = self._template_of((*before, message)).turn(before, message)
        for mark in (self._added[number].content for number in self._stop if number in self._added):
            if message.text.partition(mark)[2].strip():
                got = f"an assistant's turn with words after {mark}, which ends a turn"
                raise ConfigError("data.train", got, f"remove {mark} from the turn, or make two turns of it")
        ids = self._encode(said, self._begins_after(opened))
        if not is_written:
            return self.ended(ids)
        end = next((place for place, number in enumerate(ids) if number in self._stop), None)
        if message.tool_calls and end is not None and (rest := self.decode(ids[end + 1 :], skip_special=False).strip()):
            got = f"{self._source}, which ends a turn with {len(message.tool_calls)} calls before {rest[:60]!r}"
            raise ConfigError(
                "model.chat_template", got, "write each call as a turn of its own, followed by its answer"
            )
        if end is None and ids[-1:] and ids[-1] in self._turn_ends:
            return ids  # a mark of the format that ends a turn, though generation_config.json does not name it
        return ids + self._stop[:1] if end is None else ids[: end + 1]

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return str(self._continuing.decode(list(tokens), skip_special_tokens=skip_special))

    def encode(self, text: str) -> tuple[int, ...]:
        return self._encode(text, begins=False)

    def _encode(self, text: str, begins: bool) -> tuple[int, ...]:
        """Return the ids of text; `begins`: the tokenizer may put a space before the text."""
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
        except TypeError:  # unpaired surrogates, from the JSON of an agent or the bytes of a tool
            text = without_halves(text)
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
        ids: tuple[int, ...] = tuple(encoded.ids)
        if begins or self._continuing is self._tokenizer:
            return ids
        at = next((place for place, number in enumerate(ids) if number in self._added), len(ids))
        words = text[: encoded.offsets[at][0]] if at < len(ids) else text
        return (*self._continuing.encode(words, add_special_tokens=False).ids, *ids[at:])

    def _begins_after(self, opened: str) -> bool:
        """Return True if the tokenizer puts a space before text that follows `opened`, as before the first text."""
        if not opened or self._continuing is self._tokenizer:
            return True
        ids = self._encode(opened[-TAIL:], begins=True)
        return self._prefixes_all and ids[-1:] != () and ids[-1] in self._added

    def parse(
        self, tokens: Sequence[int], tools: Sequence[Tool] = (), before: Sequence[int] = ()
    ) -> tuple[str, tuple[ToolCall, ...], str]:
        """Return a turn's (text, tool calls, error), read in the format of `[model] tool_calls`.

        The format's marks are left out of the returned text if they are special tokens.
        """
        said = self.without_stop(tokens)
        if not tools and not self._has_headers:
            return self.decode(said), (), ""
        calls_of = self._call_format()
        special, read = self._marked(calls_of, said)
        thinking = self._thinking(calls_of, before)
        text, calls, error = calls_of.parse(read, tools, thinking) if tools else (read, (), "")
        if not calls:
            return (calls_of.words(text, special, thinking) if self._has_headers else self.decode(said)), (), error
        return calls_of.words(text, special, thinking).rstrip(), calls, error

    def parse_beginning(self, tokens: Sequence[int], tools: Sequence[Tool] = (), before: Sequence[int] = ()) -> str:
        if not tools and not self._has_headers:
            return super().parse_beginning(tokens)
        calls_of = self._call_format()
        special, read = self._marked(calls_of, self.without_stop(tokens))
        thinking = self._thinking(calls_of, before)
        # Stop at the first incomplete character, wherever it is: a special token may separate its bytes.
        sure = calls_of.beginning(read.partition(UNFINISHED)[0], thinking)
        return calls_of.words(sure, special, thinking).rstrip()

    @property
    def _has_headers(self) -> bool:
        return self._format is not None and self._format.has_headers

    def _thinking(self, calls_of: CallFormat, before: Sequence[int]) -> bool:
        """Return True if the prompt ends with the mark that opens a thought."""
        return self.decode(before[-PROMPT_END:], skip_special=False).rstrip().endswith(calls_of.thought[0])

    def _marked(self, calls_of: CallFormat, tokens: Sequence[int]) -> tuple[tuple[str, ...], str]:
        """Return the format's marks that are special tokens, and the turn's text without any further special tokens."""
        numbers = {mark: self._tokenizer.token_to_id(mark) for mark in calls_of.all_marks}
        special = {number: mark for mark, number in numbers.items() if number in self._specials}
        read = [number for number in tokens if number not in self._specials or number in special]
        return tuple(special.values()), self.decode(read, skip_special=False)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self._stop

    @property
    def vocab_size(self) -> int:
        """The tokenizer's highest id plus one. A model's embedding is often padded to more rows."""
        return self._vocab_size

    def _template(self, tools: Sequence[Tool] = ()) -> ChatTemplate:
        chosen = self._templates.get("tool_use") if tools else None
        template = chosen or self._templates.get("default")
        if template is None:
            fix = "set it to a template or a template's file, or write prompts as plain strings"
            raise ConfigError("model.chat_template", "a conversation for a model without a chat template", fix)
        return template

    def _template_of(self, messages: Sequence[Message]) -> ChatTemplate:
        """Return the template for a conversation: that for tools, if the conversation has calls or answers of tools."""
        has_tools = any(message.tool_calls or message.role == "tool" for message in messages)
        return self._templates["tool_use"] if has_tools and "tool_use" in self._templates else self._template()

    def _call_format(self) -> CallFormat:
        if self._format is None:
            got = f"auto for prompts with tools, but {self._source} shows no known format of tool calls"
            raise ConfigError(
                FIELD, got, f"name the format in which the policy writes calls: {', '.join(sorted(FORMATS))}"
            )
        return self._format

    def _first_mark(self, ids: tuple[int, ...]) -> int | None:
        """Return the position of the first added or stop token, or None if more than white space precedes it.

        A token that ends a turn need not be flagged as special.
        """
        at = next((place for place, number in enumerate(ids) if number in self._marks), None)
        return None if at is None or self.decode(ids[:at]).strip() else at

    def _read_otherwise(self, files: ChatFiles, eos: int | None, added: Container[int]) -> dict[int, str]:
        """Return the model's end-of-sequence ids with their texts if the tokenizer can't be the model's own, else {}.

        It can't if its `eos_token` has another id, and all ids of the configuration are ordinary text or none.
        """
        if eos is None or eos in files.end_ids or any(number in added for number in files.end_ids):
            return {}
        return {number: self._tokenizer.id_to_token(number) or "" for number in files.end_ids}

    def _find_end_of_turn(self, files: ChatFiles) -> int | None:
        """Return the added or stop token that the template puts after every assistant's turn, or None."""
        if "default" not in self._templates:
            return None
        template, asked = self._templates["default"], (Message("user", "x"),)
        try:
            closing, going_on = template.after_turn(asked, (), speak=False), template.after_turn(asked, ())
        except ConfigError:  # the template refuses so short a chat; `delta` raises if it refuses the real chat too
            return None
        ids = self.encode(closing)
        at = self._first_mark(ids)
        # If the template always opens the next turn, this token may be that turn's start, not the last one's end.
        if at is None or (closing == going_on and ids[at] not in files.end_ids):
            return None
        return ids[at]


def continuing(tokenizer: Tokenizer) -> tuple[Tokenizer, bool]:
    """Return a tokenizer for text that follows other text, and whether the given one also prefixes text after marks.

    The returned tokenizer puts no space before a text and drops none. It is the given one if that does neither. Most
    tokenizers of the sentencepiece kind prefix only the first words of a text; older ones prefix the words after each
    added token as well.
    """
    named = {name: getattr(tokenizer, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    steps = {name: json.loads(each.__getstate__()) for name, each in named.items() if each is not None}
    if steps.get("decoder", {}).get("type") == "ByteLevel":
        del steps["decoder"]  # its setting `add_prefix_space` has no effect
    kept = {name: _without_prefix(each) for name, each in steps.items()}
    if kept == steps:
        return tokenizer, False
    prefixes = any(kept.get(name) != steps.get(name) for name in ("normalizer", "pre_tokenizer"))
    prefixes_all = prefixes and '"prepend_scheme": "first"' not in json.dumps(steps.get("pre_tokenizer"))
    return Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), **kept})), prefixes_all


def _without_prefix(step: Any) -> Any:
    """Return a normalizer, pre-tokenizer or decoder, as in `tokenizer.json`, that neither adds nor drops a first space."""
    inner = next((key for key in ("normalizers", "pretokenizers", "decoders") if key in step), None)
    if inner is not None:
        return {**step, inner: [_without_prefix(each) for each in step[inner] if each["type"] != "Prepend"]}
    if step["type"] == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    changes: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
        "Strip": {"start": 0} if "start" in step else {"strip_left": False},
    }  # fmt: skip
    return {**step, **changes.get(step["type"], {})}


def _date(given: str | None) -> datetime:
    try:
        return datetime.now() if given is None else datetime.fromisoformat(given)
    except ValueError as error:
        raise ConfigError(
            "model.chat_template_date", repr(given), "write it as YYYY-MM-DD or YYYY-MM-DDTHH:MM:SS"
        ) from error


def _opening(files: ChatFiles) -> tuple[int, ...]:
    """Return the ids to put before a bare string: the beginning-of-sequence token, or none.

    The setting `add_bos_token` decides; if it is missing, the tokenizer's post-processor does.
    """
    wanted = files.settings.get("add_bos_token")
    bos = files.tokenizer.token_to_id(files.special.get("bos_token", ""))
    if bos is None or wanted is False:
        return ()
    added = wanted or files.tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos]
    return (bos,) if added else ()


def _media(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(media.reference for media in media_of(messages))
