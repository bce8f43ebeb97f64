# SPDX-License-Identifier: Apache-2.0
"""The F1 of question answering, as SQuAD and HotpotQA count it: words that a response shares with a gold answer.

Text is compared in Unicode's compatible form, without case, punctuation and English articles. Scripts that are written
without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are counted by the letter, all others by the word.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from relax_core.api import Options, Outcome, Reward, Score, Task, Trajectory
from relax_plugin_rewards.answers import Think, after_thinking, gold_texts, last_tagged

WHOLE = ("yes", "no", "noanswer")
"""Answers that share nothing with any other."""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_UNSPACED = re.compile(
    r"([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003134f])"
)


class F1Options(Options):
    """Options of `f1`."""

    exact_match: bool = False
    """1 only for all words of a gold answer in their order, and for none else; otherwise the share that is common."""
    think: Think = "optional"
    """`optional`: what follows the last `</think>` counts, and everything where nothing was thought; `required`: there
    must be one; `ignored`: everything counts."""
    tag: str = ""
    """Judge only what stands in the last `<tag>...</tag>` of this name, such as `answer`; empty: the whole response."""
    truncated: bool = False
    """Judge a response that a limit cut off; otherwise it scores 0: finishing is part of the task."""


class F1(Reward[F1Options]):
    """Gives from 0 to 1 for the words in common with the gold answer, with the best one where there are several."""

    needs_columns = ("answer",)

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
    """Split a text into what is counted. An answer of nothing but articles or signs (`The The`, `+`) keeps them."""
    text = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(sign for sign in text if unicodedata.category(sign)[0] not in "PSC" or sign.isspace())
    for form in (_ARTICLES.sub(" ", kept), kept, text):
        if found := _UNSPACED.sub(r" \1 ", form).split():
            return found
    return []


def f1(said: list[str], gold: list[str]) -> float:
    """Compute the harmonic mean of precision and recall over words, each as often as it occurs."""
    if said != gold and any(len(one) == 1 and one[0] in WHOLE for one in (said, gold)):
        return 0.0
    common = sum((Counter(said) & Counter(gold)).values())
    return 2 * common / (len(said) + len(gold))
