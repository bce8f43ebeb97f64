# SPDX-License-Identifier: Apache-2.0
"""The F1 score of question answering (SQuAD, HotpotQA): the share of words that response and gold answer have in common.

The comparison uses Unicode's form NFKC, and ignores case, punctuation and English articles. Scripts that are written
without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are split into letters, all remaining scripts into words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from relax_core.api import Gold, Options, Outcome, Reward, Score, Task, Trajectory
from relax_plugin_rewards.answers import Think, after_thinking, gold_texts, last_tagged

WHOLE = ("yes", "no", "noanswer")
"""Words that are complete answers: if response or gold answer is one of these words, any difference scores 0."""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_MARKS = {".": "\ue000", "-": "\ue001"}
_SIGNS = {mark: sign for sign, mark in _MARKS.items()}
_UNMARKED = dict.fromkeys(map(ord, _SIGNS))
_IN_NUMBER = re.compile(r"(?<=\d)\.(?=\d)|(?<!\S)-(?=\.?\d)")
"""Decimal point and minus sign of a number, which are not punctuation: 1.5 is not 15."""
_UNSPACED = re.compile(
    r"([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003134f])"
)


class F1Options(Options):
    """Options of `f1`."""

    exact_match: bool = False
    """True: score 1 if the words and their order equal those of a gold answer, else 0; False: score the words' F1."""
    think: Think = "optional"
    """Judged part of a response. `optional`: the text after the last `</think>`, or all if it has no `</think>`;
    `required`: the same, but a response without `</think>` has no answer; `ignored`: the whole response."""
    tag: str = ""
    """Name of a tag, such as `answer`: only the content of the last `<answer>...</answer>` is judged; empty: the judged
    part is not restricted to a tag."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


class F1(Reward[F1Options]):
    """A reward from 0 to 1: the best F1 of the response's words against any of the gold answers."""

    needs_columns = ("answer",)

    def gold(self, task: Task) -> Gold:
        golds = gold_texts(task)
        opened, closed = (f"<{self.options.tag}>", f"</{self.options.tag}>") if self.options.tag else ("", "")
        thought = "<think>so</think>" if self.options.think == "required" else ""
        read = " or ".join("words " + " ".join(words(gold)) for gold in golds)
        return Gold(read, tuple(f"{thought}{opened}{gold}{closed}" for gold in golds))

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        golds = [words(gold) for gold in gold_texts(task)]
        response = after_thinking(trajectory.response, self.options.think)
        said = words(last_tagged(response, self.options.tag) if self.options.tag else response)
        if not said or (trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated):
            return Score(0.0, {"exact_match": 0.0})
        exact = float(said in golds)
        return Score(
            exact if self.options.exact_match else max(f1(said, gold) for gold in golds), {"exact_match": exact}
        )


def words(text: str) -> list[str]:
    """Return the words to compare, without articles and punctuation, unless the text consists only of these."""
    text = unicodedata.normalize("NFKC", text).casefold()
    marked = _IN_NUMBER.sub(lambda sign: _MARKS[sign[0]], text.translate(_UNMARKED))
    kept = "".join(
        sign for sign in marked if unicodedata.category(sign)[0] not in "PSC" or sign in _SIGNS or sign.isspace()
    )
    kept = "".join(_SIGNS.get(sign, sign) for sign in kept)
    for form in (_ARTICLES.sub(" ", kept), kept, text):
        if found := _UNSPACED.sub(r" \1 ", form).split():
            return found
    return []


def f1(said: list[str], gold: list[str]) -> float:
    """Return the harmonic mean of precision and recall of the words `said`; repeated words count repeatedly."""
    if said != gold and any(len(one) == 1 and one[0] in WHOLE for one in (said, gold)):
        return 0.0
    common = sum((Counter(said) & Counter(gold)).values())
    return 2 * common / (len(said) + len(gold))
