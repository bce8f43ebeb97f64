# SPDX-License-Identifier: Apache-2.0
"""Rewards of a response's form, for any task: `format`, `overlong` and `repetition`. Add a reward of the answer."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from relax_core.api import Options, Outcome, Reward, Score, Task, Trajectory

Unit = Literal["tokens", "words", "characters"]
_TAG = re.compile(r"[A-Za-z][\w-]*")


class FormatOptions(Options):
    """Options of `format`; at least one of `tags`, `pattern` and `json_schema` must be set."""

    tags: tuple[str, ...] = ()
    """Names of tags, such as `["think", "answer"]`: the response must consist of `<think>...</think>` and
    `<answer>...</answer>`, each once, in this order, with nothing but white space around them."""
    pattern: str = ""
    """Regular expression (Python's `re`, with `.` for every character) that must match the whole response."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema (draft 2020-12) that the response must fulfil as JSON; `{}` accepts any JSON. With `tags`, the content
    of the last tag is read."""
    mode: Literal["all", "share"] = "all"
    """`all`: score 1 if every check that is set passes, else 0; `share`: score the share of the checks that pass."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""

    @model_validator(mode="after")
    def _checks(self) -> FormatOptions:
        if not (self.tags or self.pattern or self.json_schema is not None):
            raise ValueError("tags, pattern and json_schema are all missing; set at least one of them")
        if wrong := [tag for tag in self.tags if not _TAG.fullmatch(tag)]:
            raise ValueError(f"tags: got {wrong[0]!r}; a name has letters, digits, - and _, and begins with a letter")
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags: got {', '.join(self.tags)}; name each tag once")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"pattern: got {self.pattern!r}; write a regular expression of Python ({error})"
            ) from error
        if self.json_schema is not None:
            from jsonschema import Draft202012Validator, SchemaError

            try:
                Draft202012Validator.check_schema(self.json_schema)
            except SchemaError as error:
                raise ValueError(f"json_schema: {error.message}; write a JSON Schema of draft 2020-12") from error
        return self


class Format(Reward[FormatOptions]):
    """1 if the response has the required form, else 0. `parts`: each check, `tags`, `pattern` and `json_schema`."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        parts = {name: 0.0 for name in ("tags", "pattern", "json_schema") if self._is_set(name)}
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return Score(0.0, parts)
        response, content = trajectory.response, trajectory.response
        if self.options.tags:
            # The content of each tag if the text consists of these tags, each once and in this order; else [].
            marks = [mark for tag in self.options.tags for mark in (f"<{tag}>", f"</{tag}>")]
            texts = re.split("|".join(map(re.escape, marks)), response)
            joined = "".join(map("".join, zip(texts, [*marks, ""], strict=False)))
            whole = len(texts) == len(marks) + 1 and joined == response
            contents = texts[1::2] if whole and not any(map(str.strip, texts[::2])) else []
            parts["tags"] = float(bool(contents))
            content = contents[-1] if contents else ""
        if self.options.pattern:
            parts["pattern"] = float(re.fullmatch(self.options.pattern, response, re.DOTALL) is not None)
        if self.options.json_schema is not None:
            parts["json_schema"] = float(self._fulfils(content))
        passed = sum(parts.values())
        return Score(passed / len(parts) if self.options.mode == "share" else float(passed == len(parts)), parts)

    def _is_set(self, name: str) -> bool:
        value = getattr(self.options, name)
        return value is not None and value not in ((), "")

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator

        return Draft202012Validator(self.options.json_schema)

    def _fulfils(self, text: str) -> bool:
        def refuse(constant: str) -> Any:
            raise ValueError(f"{constant} is not JSON")

        try:
            value = json.loads(text, parse_constant=refuse)
            return bool(self._validator.is_valid(value))
        except (ValueError, RecursionError):
            return False


class OverlongOptions(Options):
    """Options of `overlong`; the defaults are those of DAPO (arXiv 2503.14476, section 3.4)."""

    max_length: PositiveInt = 20480
    """Length at which the penalty reaches -1."""
    buffer: PositiveInt = 4096
    """The penalty falls from 0 to -1 over this length below `max_length`."""
    unit: Unit = "tokens"
    """Unit of the length. `tokens` counts all tokens that the policy sampled, `words` and `characters` those of the
    response."""

    @model_validator(mode="after")
    def _ordered(self) -> OverlongOptions:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer: got {self.buffer}; set at most max_length, which is {self.max_length}")
        return self


class Overlong(Reward[OverlongOptions]):
    """DAPO's soft overlong penalty (eq. 13): 0 up to `max_length - buffer`, falling to -1 at `max_length`."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        if self.options.unit == "tokens":
            length = trajectory.num_sampled
            if not length and trajectory.response:
                raise ValueError(
                    "unit: got tokens, but the sample has no tokens, as in a file; use words or characters"
                )
        else:
            length = len(_parts(trajectory.response, self.options.unit))
        over = length - (self.options.max_length - self.options.buffer)
        return Score(max(min(0.0, -over / self.options.buffer), -1.0), {"length": float(length)})


class RepetitionOptions(Options):
    """Options of `repetition`."""

    ngram: PositiveInt = 20
    """Number of successive words or characters in one n-gram (20 in arXiv 2502.03373)."""
    penalty: float = Field(-1.0, lt=0.0, ge=-1e6)
    """Score of a response that only repeats itself."""
    unit: Literal["words", "characters"] = "words"
    """`characters` is for languages that are written without spaces."""


class Repetition(Reward[RepetitionOptions]):
    """`penalty` times the share of n-grams that occurred before in the response; 0 without a repetition.

    Source: the n-gram repetition penalty of Yeo et al., arXiv 2502.03373, appendix, in the normalised form that is common
    in open reproductions of R1: 1 minus distinct n-grams over all n-grams.
    """

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        units = _parts(trajectory.response, self.options.unit)
        count = max(len(units) - self.options.ngram + 1, 0)
        ngrams = zip(*(units[start:] for start in range(self.options.ngram)), strict=False)
        distinct = len(set(map(hash, ngrams)))  # hashes need less memory than words
        share = 1.0 - distinct / count if count else 0.0
        return Score(self.options.penalty * share, {"repeated": share})


def _parts(text: str, unit: Unit) -> list[str]:
    return text.split() if unit == "words" else list(text)
