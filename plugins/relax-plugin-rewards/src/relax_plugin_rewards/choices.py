# SPDX-License-Identifier: Apache-2.0
"""The rewards `multiple-choice` and `gpqa`: 1 if a response's final choice is the gold label. `gpqa` has labels A to D.

A response states its choice in a box, in `<answer>` tags, after "answer is" or "Answer:", as "I pick B", or alone at
its end. One reader reads all of these forms: a label, a choice's whole text, or both. A label comes before a text, so
"B" is choice B even if choice A has the text "B". Phrases are read in English, Chinese, German, French and Spanish;
boxes, tags and lines that hold only a choice, in any language.

The last statement counts, so a response may change its mind. Statements separated only by a comma, "or" or nothing
count as one: if they name different choices, the response is wrong. "The answer is not B" takes back B.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from relax_core.api import Gold, Options, Outcome, Reward, Task, Trajectory
from relax_plugin_rewards.answers import Think, after_thinking, all_boxes, gold_text, gold_values

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Characters of Unicode's private use area that mark a box or a tag in the searched text."""
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKUP = re.compile(
    r"\\(?:(?:text|math)(?:bf|it|rm|sf|tt)|text|emph|underline|mbox|boldsymbol|bm|rm|bf|it)(?![a-zA-Z])|\\[()\[\],;! ]"
    r"|</?(?:b|i|u|em|strong)>|[*$`{}\"']|(?<!\w)_++|(?<!_)_++(?!\w)"
)
_HEDGE = r"(?:[\s,;:/&.()|+-]|\b(?i:or|and|maybe|perhaps|possibly|also|either|both|oder|und|ou|et|o|y)\b|[\u6216\u548c\u3001])*"
_PHRASE = re.compile(
    r"(?:\b(?:answer|choice|option|antwort|r\u00e9ponse|respuesta)\b"
    r"(?:\s+(?:choice|option|letter|finale?|correcta|correcte)\b)?|\u7b54\u6848|\u9009\u9879|\u9078\u9805)\s*"
    r"(?::|=|\b(?:is|would be|must be|should be|has to be|ist|lautet|w\u00e4re|est|es)\b"
    r"|(?:\u5e94\u8be5|[\u5e94\u61c9])?[\u662f\u4e3a\u70ba\u9009\u9078])+(?:\s*:)?"
    r"(?:\s+(?:definitely|clearly|therefore|thus|most likely|probably)\b)?"
    r"(?P<denied>\s*\b(?:not|nicht|pas)\b)?\s*(?:the\b\s*)?(?:(?:option|choice|answer|letter|antwort|opci\u00f3n)\b)?[\s:]*+",
    re.IGNORECASE,
)
"""A phrase before a choice, in Unicode's form NFKC: "answer is", and the like in Chinese, German, French and Spanish."""
_VERB = re.compile(
    r"(?:\b(?:pick|choose|select|go(?:ing)? with|opt for)\s+(?:(?:option|choice|answer|letter)\s+)?"
    r"|[\u9009\u9078][\u62e9\u64c7]?\s*:?\s*)",
    re.IGNORECASE,
)
_EITHER = re.compile(r"(?:either|both)\s+", re.IGNORECASE)
_BUT = re.compile(r"[\s,;]*(?:but|rather|sondern|mais|sino)\s+(?:(?:option|choice|letter)\s+)?", re.IGNORECASE)
_BEFORE = re.compile(rf"(?:[{_OPEN}{_CLOSE}]|[^\S\n])*+(?:[-+>#\u2022]++[^\S\n]++)*")
"""List marks and the like on the line of a choice that is alone there."""
_LINE_END = re.compile(rf"[ \t).\]!:,\u3002{_OPEN}{_CLOSE}]*(?:\n|\Z)")
_SENTENCE_END = re.compile(r"[^\w\n]*(?:\Z|[.!\n\u3002])")
_SEPARATOR = re.compile(
    r"[ \t]*(?:,[ \t]*(?:(?:or|and)\b)?|/|&|;|\b(?:and|und|et|y)\b|[\u548c\u3001]|(?P<or>\b(?:or|oder|ou|o)\b|\u6216)"
    r"|(?<=[ \t]))(?:[ \t]+(?:maybe|perhaps|possibly)\b)?[ \t]*(?:(?:option|choice)[ \t]+)?",
    re.IGNORECASE,
)
_REASON = (
    r"because|since|as|and|or|but|for|which|given|due|so|not|weil|da|denn|und|oder|car|parce|et|ou|porque|pues|y|o"
)
"""Words that may follow a choice: the text of a choice is read in "Rome because", but not in "Rome is"."""
_AFTER_LABEL = re.compile(
    rf"(?!\s*[=^]|\s+[<>])(?!\s+(?!(?:{_REASON}|is|with|by|in|when|if|from|on|under|after|that|where|here|then|according|per"
    r"|although|though|while|based|ya)\b)[a-z\u00df-\u024f])"
)
"""The text after a label: "B because" names choice B, "B cells" does not."""
_AFTER_TEXT = (
    rf"(?=\s*(?:\Z|\n|[{_OPEN}{_CLOSE})\]\u3002\u3001]|[.!?;:]+(?:\s|\Z|[{_OPEN}{_CLOSE}])|,(?!\s*[\d.-]))"
    rf"|[ \t]+(?:\(|[-\u2013\u2014]\s+\D|(?i:{_REASON})\b))"
)
_AFTER_LOWER_CASE = re.compile(rf"\s*(?:\Z|\n|[{_CLOSE}).\]:;,!?\u3002])")
_BETWEEN_LABEL_AND_TEXT = re.compile(r"[ \t]*[.:=\u2013\u2014-]?[ \t]*")


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
        forms = ("\\boxed{{{}}}", "Answer: {}")
        return Gold(read, tuple(thought + form.format(label) for form in forms for label in labels))

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
        fix = f"give it a list of up to {len(LETTERS)} choices or a table of labels, or set `letters`"
        labels: Sequence[object] = LETTERS
        if isinstance(column, Mapping) and {"label", "text"} <= set(column):
            labels, column = column["label"], column["text"]
            if not all(isinstance(part, list | tuple) for part in (labels, column)) or len(labels) != len(column):
                raise ValueError(
                    f"task {task.id}: column {name!r} needs a list of labels and one of as many texts; {fix}"
                )
        elif isinstance(column, Mapping):  # table formats fill missing choices with nulls
            present = {label: text for label, text in column.items() if text is not None and text == text}
            labels, column = list(present), list(present.values())
        if not isinstance(column, list | tuple) or not 0 < len(column) <= len(labels):
            raise ValueError(f"task {task.id} has no choices in column {name!r}; {fix}")
        choices: dict[str, str] = {}
        for label, text in zip(labels, column, strict=False):
            if (
                not isinstance(text, str | int | float)
                or text != text
                or not isinstance(label, str | int)
                or not str(label).strip()
            ):
                raise ValueError(f"task {task.id} has no choices in column {name!r}: got {label!r}: {text!r}; {fix}")
            bare = str(label).strip(" ().:[]") or str(label).strip()
            choices[bare] = text.strip() if isinstance(text, str) else gold_text(task, text)
        bare_texts = {label: _without_label(label, text) for label, text in choices.items()}
        if all(bare_texts[label] != text for label, text in choices.items()):
            choices = bare_texts
        if len({label.casefold() for label in choices}) < min(len(labels), len(column)):
            raise ValueError(f"task {task.id}: column {name!r} repeats a label; {fix}")
        return choices


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
    texts = {label: _without_label(label, said) for label in choices}
    same = [label for label, text in choices.items() if text and text.casefold() == texts[label].casefold()]
    same = [label for label in same if choices[label] == texts[label]] or same
    if len(same) != 1:
        which = "is none of its choices" if not same else f"is the text of {' and '.join(same)}"
        raise ValueError(f"task {task.id}: answer {said!r} {which}, {', '.join(choices)}; correct the answer column")
    return same[0]


def _without_label(label: str, text: str) -> str:
    """Return `Rome` for the label B and the text `B. Rome` or `(B) Rome`; any other text unchanged."""
    return re.sub(rf"^\(?{re.escape(label)}[).:]\s+", "", text)


def final_choice(response: str, choices: Mapping[str, str]) -> str | None:
    """Return the label of the response's final choice; None if the response names no choice, or several at once."""
    reader = _reader(tuple((label, _unmarked(text)) for label, text in choices.items()))
    text = _unmarked(_TAGGED.sub(lambda tagged: f"{_OPEN}{tagged[1]}{_CLOSE}", _marked(response)))
    found = sorted([*_spoken(text, reader), *_alone(text, reader)], key=lambda one: one.end)
    denied = [one for one in found if one.denied]
    found = [one for one in found if not one.denied]
    if not found:
        return None
    labels, begin = found[-1].labels, found[-1].start
    if any(one.start > found[-1].end and one.labels & labels for one in denied):
        return None
    for earlier in reversed(found[:-1]):
        if earlier.end < begin and not re.fullmatch(_HEDGE, text[earlier.end : begin].strip(_OPEN + _CLOSE)):
            break
        labels, begin = labels | earlier.labels, min(begin, earlier.start)
    return next(iter(labels)) if len(labels) == 1 else None


@dataclass(frozen=True, slots=True)
class Statement:
    """A span of the text that names one or more choices, from `start` to `end` in characters."""

    start: int
    end: int
    labels: frozenset[str]
    denied: bool = False
    """True: the statement says that these are not the answer."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """The reader of choices at a position of a text: labels, whole texts, or labels with their texts."""

    label: re.Pattern[str]
    """A label, in brackets or not. Groups: the label, its closing brackets."""
    text: re.Pattern[str]
    """The whole text of a choice, the longest first. Group: the text, without what follows."""
    labels: Mapping[str, str]
    """The label by its casefolded form."""
    texts: Mapping[str, Mapping[str, frozenset[str]]]
    """The labels by text, by casefolded text without white space."""

    def choices(self, text: str, start: int) -> tuple[frozenset[str], int] | None:
        """Return the choices at `start`, joined by commas, "or" and the like, and their end; None without a choice."""
        either = _EITHER.match(text, start)
        found = self._choice(text, start) or (self._choice(text, either.end()) if either else None)
        while found is not None and (joined := _SEPARATOR.match(text, found[1])):
            more = self._choice(text, joined.end())
            if not joined[0].strip() and (more is None or not _LINE_END.match(text, more[1])):
                break
            if more is None:
                return None if joined["or"] or text[joined.end() : joined.end() + 1].isdigit() else found
            found = found[0] | more[0], more[1]
        return found

    def _choice(self, text: str, start: int) -> tuple[frozenset[str], int] | None:
        label, said = self.label.match(text, start), self._text(text, start)
        if said is not None and (label is None or said[1] > label.end(1)):
            return said
        if label is None:
            return None
        name, gap = self.labels[label[1].casefold()], _BETWEEN_LABEL_AND_TEXT.match(text, label.end())
        said = self._text(text, gap.end() if gap else label.end())
        if said is not None:
            return frozenset((name,)) if name in said[0] else said[0] | {name}, said[1]
        follows = _AFTER_LABEL if name == label[1] else _AFTER_LOWER_CASE
        return (frozenset((name,)), label.end()) if label[2] or follows.match(text, label.end()) else None

    def _text(self, text: str, start: int) -> tuple[frozenset[str], int] | None:
        """Return the choices with the text at `start`, which may be in brackets, and its end."""
        said = self.text.match(text, start) or (
            self.text.match(text, start + 1) if text[start : start + 1] in ("(", "[") else None
        )
        if said is None:
            return None
        same = self.texts[_key(said[1])]
        return same.get("".join(said[1].split())) or frozenset().union(*same.values()), said.end()


@lru_cache(maxsize=256)
def _reader(choices: tuple[tuple[str, str], ...]) -> _Reader:
    labels = sorted((label for label, _ in choices), key=len, reverse=True)
    texts: dict[str, dict[str, frozenset[str]]] = {}
    words = []
    for label, text in choices:
        if bare := text.rstrip(". "):
            same = texts.setdefault(_key(bare), {})
            exact = "".join(bare.split())
            same[exact] = same.get(exact, frozenset()) | {label}
            words.append(bare)
    written = [
        r"\s+".join(map(re.escape, text.split())).replace(",", r",\s*").replace(r",\s*\s+", r",\s*")
        for text in sorted(words, key=len, reverse=True)
    ]
    one = "|".join(map(re.escape, labels))
    return _Reader(
        re.compile(rf"[(\[]*[ \t]*((?i:{one}))(?![A-Za-z0-9_\u00c0-\u024f])(?![.,]\d|-\w|[+#])\s*?([)\]]*)"),
        re.compile(rf"((?i:{'|'.join(written) or '(?!)'})){_AFTER_TEXT}"),
        {label.casefold(): label for label in labels},
        texts,
    )


def _key(text: str) -> str:
    return "".join(text.split()).casefold()


def _spoken(text: str, reader: _Reader) -> Iterator[Statement]:
    """Yield the phrases that name choices, such as "the answer is B" and "I pick B."."""
    for phrase in _PHRASE.finditer(text):
        start = phrase.end() + (text[phrase.end() : phrase.end() + 1] == _OPEN)
        if found := reader.choices(text, start):
            denied = phrase["denied"] is not None
            yield Statement(phrase.start(), found[1], found[0], denied)
            but = _BUT.match(text, found[1]) if denied else None
            if but and (found := reader.choices(text, but.end())):
                yield Statement(but.end(), found[1], found[0])
    for verb in _VERB.finditer(text):
        found = reader.choices(text, verb.end())
        if found and _SENTENCE_END.match(text, found[1]):
            yield Statement(verb.start(), found[1], found[0])


def _alone(text: str, reader: _Reader) -> Iterator[Statement]:
    """Yield the boxes and tags that begin with a choice, and the last lines that hold nothing else."""
    for marked in re.finditer(rf"{_OPEN}\s*+([^{_OPEN}{_CLOSE}]*+){_CLOSE}", text):
        if found := reader.choices(text, marked.start(1)):
            yield Statement(marked.start(), marked.end(), found[0])
    end = len(text)
    for line in reversed(text.split("\n")):
        start = end - len(line)
        if line.strip():
            before = _BEFORE.match(text, start)
            found = reader.choices(text, before.end() if before else start)
            if not found or not _LINE_END.match(text, found[1]):
                break
            yield Statement(start, found[1], found[0])
        end = start - 1


def _marked(text: str) -> str:
    """Return a text with a mark at the start and end of each box. A box that is never closed ends the text."""
    signs = list(text.replace(_OPEN, " ").replace(_CLOSE, " "))
    closed, unclosed = all_boxes(text)
    for start, inside, end in closed:
        signs[start:inside] = [_OPEN, *[""] * (inside - start - 1)]
        signs[end - 1] = _CLOSE
    return "".join(signs[:unclosed])


def _unmarked(text: str) -> str:
    """Return a text without markup that only changes its appearance, in Unicode's normal form NFKC."""
    return _MARKUP.sub("", unicodedata.normalize("NFKC", text)).strip()
