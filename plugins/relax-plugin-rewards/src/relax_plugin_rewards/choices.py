# SPDX-License-Identifier: Apache-2.0
"""The rewards `multiple-choice` and `gpqa`: 1 if a response's final choice is the gold label. `gpqa` has labels A to D.

A response states its choice in a box, in `<answer>` tags, after "answer is" or "Answer:", as "I pick B", or alone at
its end. The last statement counts, so a response may change its mind. Statements separated only by a comma, "or" or
nothing count as one: if they name different labels, the response is wrong.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from relax_core.api import Gold, Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards.answers import Think, after_thinking, boxes, gold_values

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Characters of Unicode's private use area that mark a box or a tag in the searched text."""
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKUP = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox|boldsymbol|rm|bf)(?![a-zA-Z])|\\[()\[\],;! ]|[*$`{}\[\]\"']|(?<!\w)_|_(?!\w)"
)
_HEDGE = r"(?:[\s,;:/&.()|+-]|\b(?i:or|and|maybe|perhaps|possibly|also|either|both)\b)*"
_PHRASE = (
    r"(?i:\b(?:answer|choice|option)\b(?:\s+(?:choice|option|letter))?\s*"
    r"(?::|=|\b(?:is|would be|must be|should be|has to be)\b)+(?:\s*:)?"
    r"(?:\s+(?:definitely|clearly|therefore|thus|most likely|probably))?\s*(?:(?:option|choice|answer|letter)\b)?)[\s:]*"
)
_VERB = r"(?i:\b(?:pick|choose|select|go(?:ing)? with|opt for)\s+(?:(?:option|choice|answer|letter)\s+)?)"
_AFTER_ARTICLE = r"(?!\s+(?!(?:because|since|as|and|or|but|for|which|with|is|given|due|so|not|by)\b)[a-z])"


class MultipleChoiceOptions(Options):
    """Options of `multiple-choice`."""

    choices: str = "choices"
    """Name of the column with the choices: a list of texts (labelled A, B, ...), or a table of labels and texts."""
    letters: int = Field(0, ge=0, le=26)
    """Number of letters, from A on, that label the choices of a task without the column `choices`; 0: every task needs
    this column."""
    think: Think = "optional"
    """Judged part of a response. `optional`: the text after the last `</think>`, or all if it has no `</think>`;
    `required`: the same, but a response without `</think>` has no answer; `ignored`: the whole response."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class MultipleChoice(Reward[MultipleChoiceOptions]):
    """A reward of 1 if the response's final choice is a gold answer, else 0."""

    needs_columns = ("answer",)

    def gold(self, task: Task) -> Gold:
        choices = self._choices(task)
        labels = [gold_label(task, gold, choices) for gold in gold_values(task)]
        thought = "<think>so</think>" if self.options.think == "required" else ""
        read = " or ".join(f"choice {label}: {choices[label]}".removesuffix(": ") for label in labels)
        return Gold(read, tuple(f"{thought}\\boxed{{{label}}}" for label in labels))

    def score(self, task: Task, trajectory: Trajectory) -> float:
        choices = self._choices(task)
        golds = {gold_label(task, gold, choices) for gold in gold_values(task)}
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        return float(final_choice(after_thinking(trajectory.response, self.options.think), choices) in golds)

    def _choices(self, task: Task) -> dict[str, str]:
        """Return the task's choices, text by label; the texts are empty if `letters` supplies the labels."""
        column, name = task.column(self.options.choices), self.options.choices
        if column is None and self.options.letters:
            return dict.fromkeys(LETTERS[: self.options.letters], "")
        if isinstance(column, Mapping) and {"label", "text"} <= set(column):
            column = dict(zip(column["label"], column["text"], strict=True))
        if isinstance(column, Sequence) and not isinstance(column, str) and 0 < len(column) <= len(LETTERS):
            column = dict(zip(LETTERS, column, strict=False))
        if not isinstance(column, Mapping) or not column or not all(str(label).strip() for label in column):
            fix = f"give it a list of up to {len(LETTERS)} choices or a table of labels, or set `letters`"
            raise ValueError(f"task {task.id} has no choices in column {name!r}; {fix}")
        return {str(label).strip(): str(text).strip() for label, text in column.items()}


class GpqaOptions(MultipleChoiceOptions):
    """Options of `gpqa`."""

    letters: int = Field(4, ge=0, le=26)
    """Number of letters, from A on, that label the choices of a task without the column `choices`; 0: every task needs
    this column."""


class Gpqa(MultipleChoice, Reward[GpqaOptions]):
    """A reward of 1 if the response's final choice, by default among A to D, is a gold answer, else 0."""


def gold_label(task: Task, gold: object, choices: Mapping[str, str]) -> str:
    """Return the label of a gold answer, which may be a label, a choice's text, or an index from 0.

    Raises ValueError naming the task if the answer matches no choice, or matches the texts of several choices.
    """
    said = str(gold).strip()
    by_case = {label.casefold(): label for label in choices}
    bare = said.strip("().: ").casefold()
    if label := by_case.get(bare):
        return label
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices):
        return list(choices)[gold]
    same = [label for label, text in choices.items() if text and text.casefold() == said.casefold()]
    if len(same) != 1:
        which = "is none of its choices" if not same else f"is the text of {' and '.join(same)}"
        raise ValueError(f"task {task.id}: answer {said!r} {which}, {', '.join(choices)}; correct the answer column")
    return same[0]


def final_choice(response: str, choices: Mapping[str, str]) -> str | None:
    """Return the label of the response's final choice; None if the response names no label, or several at once."""
    choices = {label: _unmarked(text) for label, text in choices.items()}
    text = response.replace(_OPEN, "").replace(_CLOSE, "")
    for start, end, content in reversed(boxes(text)):
        text = f"{text[:start]}{_OPEN}{content}{_CLOSE}{text[end:]}"
    text = _unmarked(_TAGGED.sub(lambda tagged: f"{_OPEN}{tagged[1]}{_CLOSE}", text))
    pattern = _pattern(tuple(choices))
    found = [*_spoken(text, pattern), *_alone(text, pattern, choices)]
    if not found:
        return None
    found.sort(key=lambda one: one.end)
    labels, begin = found[-1].labels, found[-1].start
    for earlier in reversed(found[:-1]):
        if earlier.end < begin and not re.fullmatch(_HEDGE, text[earlier.end : begin].strip(_OPEN + _CLOSE)):
            break
        labels, begin = labels | earlier.labels, min(begin, earlier.start)
    return next(iter(labels)) if len(labels) == 1 else None


@dataclass(frozen=True, slots=True)
class Statement:
    """A span of the text that names one or more labels, from `start` to `end` in characters."""

    start: int
    end: int
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Pattern:
    spoken: re.Pattern[str]
    """A phrase and the labels after it. Groups: labels after "answer is", one such label in lower or upper case, labels
    after a verb."""
    label: re.Pattern[str]
    whole: re.Pattern[str]
    """A text that begins with labels. Groups: the labels, the rest of the text."""
    by_case: Mapping[str, str]


@lru_cache(maxsize=256)
def _pattern(labels: tuple[str, ...]) -> _Pattern:
    longest_first = sorted(labels, key=len, reverse=True)
    article = [re.escape(label) + (_AFTER_ARTICLE if label in ("A", "I") else "") for label in longest_first]
    one = rf"(?<!\w)\(?\s*(?:{'|'.join(article)})(?!\w)\s*\)?"
    any_case = rf"(?<!\w)(?i:{'|'.join(map(re.escape, longest_first))})(?!\w)"
    between = r"\s*(?:,\s*(?i:or\b|and\b)?|/|&|;|(?i:\bor\b|\band\b))(?:\s+(?i:maybe|perhaps|possibly))?\s*(?:(?i:option)\s+)?"
    several = rf"{one}(?:{between}{one})*"
    spoken = (
        rf"{_PHRASE}{_OPEN}?(?:({several})|\(?({any_case})\)?(?=[\s.]*(?:\n|$)))|{_VERB}({several})(?=\W*(?:$|[.!\n]))"
    )
    return _Pattern(
        re.compile(spoken), re.compile(any_case), re.compile(rf"\W*({several})(.*)", re.DOTALL),
        {label.casefold(): label for label in labels},
    )  # fmt: skip


def _spoken(text: str, pattern: _Pattern) -> list[Statement]:
    """Return the phrases that name labels, such as "the answer is B"."""
    found = []
    for match in pattern.spoken.finditer(text):
        labels = next(group for group in match.groups() if group)
        found.append(Statement(match.start(), match.end(), _labels(labels, pattern)))
    return found


def _alone(text: str, pattern: _Pattern, choices: Mapping[str, str]) -> list[Statement]:
    """Return boxes and tags, and the last lines that consist of a label, a choice's text, or both."""
    found = []
    for marked in re.finditer(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}", text):
        if labels := _named(marked[1], pattern, choices, loosely=True):
            found.append(Statement(marked.start(), marked.end(), labels))
    end = len(text)
    for line in reversed(text.split("\n")):
        start = end - len(line)
        if line.strip():
            labels = _named(line, pattern, choices, loosely=False)
            if not labels:
                break
            found.append(Statement(start, end, labels))
        end = start - 1
    return found


def _named(said: str, pattern: _Pattern, choices: Mapping[str, str], *, loosely: bool) -> frozenset[str]:
    """Return the labels in `said`, which should contain only a choice; empty if it contains anything else.

    `loosely`: accept any words after a label and a punctuation mark.
    """
    bare = said.strip().strip("().:, ")
    if label := pattern.by_case.get(bare.casefold()):
        return frozenset((label,))
    same = frozenset(label for label, text in choices.items() if text and text.casefold() == bare.casefold())
    if same:
        return same
    match = pattern.whole.match(said)
    if match is None:
        return frozenset()
    labels, rest = _labels(match[1], pattern), match[2].strip().lstrip(").:,- ").rstrip(". ")
    texts = {choices[label].casefold().rstrip(". ") for label in labels}
    followed = loosely and match[2].lstrip(" ")[:1] in (".", ":", ")", ",", "-", "\n")
    return labels if not rest or followed or rest.casefold() in texts else frozenset()


def _unmarked(text: str) -> str:
    """Return a text without markup that only changes its appearance, in Unicode's normal form NFKC."""
    return _MARKUP.sub("", unicodedata.normalize("NFKC", text)).strip()


def _labels(text: str, pattern: _Pattern) -> frozenset[str]:
    return frozenset(pattern.by_case[label.casefold()] for label in pattern.label.findall(text))
