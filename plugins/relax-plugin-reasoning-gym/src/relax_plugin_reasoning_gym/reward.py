# SPDX-License-Identifier: Apache-2.0
"""The reward `reasoning-gym`: scores a response's answer with the rule `score_answer` of the task's set.

Many rules give partial scores for prose, length or parts of an answer. So only a full score counts unless the option
`partial` is set.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from relax_core.api import Options, Outcome, Reward, Task, Trajectory
from relax_plugin_reasoning_gym.admission import ADMITTED
from relax_plugin_reasoning_gym.recipe import ENTRIES_KEPT, Recipe, entry, set_score

Form = Literal["tags", "boxed", "last-line", "whole"]
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_BOX_OR_BRACE = re.compile(r"\\boxed\s*\{|[{}]")


class ReasoningGymRewardOptions(Options):
    """Options of the reward `reasoning-gym`."""

    answer: Form = "tags"
    r"""Place of the answer in a response: between the last `<answer>` and `</answer>` (`tags`), in the last `\boxed{}`
    (`boxed`), the last line with text, or the whole response. A response without an answer scores 0."""
    partial: bool = False
    """True: return the rule's own score, from 0 to 1 (several rules reward prose and length). False: return 1 for a full
    score, else 0."""
    truncated: bool = False
    """True: judge a response that a limit cut off. False: a response that was cut off scores 0."""


class ReasoningGymReward(Reward[ReasoningGymRewardOptions]):
    """A reward of 1 if the set's rule gives the answer a full score, else 0; if `partial` is set, the rule's own score.

    A task is judged only if the rule gives its gold answer a full score. Some rules return a low score for every
    internal error, so without this check a broken installation would look like a policy that is always wrong.
    """

    needs_columns = ("set", "recipe")

    def __init__(self, options: ReasoningGymRewardOptions | None = None) -> None:
        super().__init__(options)
        import reasoning_gym  # noqa: F401 - slow import, which must not count against the first deadline

    def score(self, task: Task, trajectory: Trajectory) -> float:
        recipe = Recipe.of(task.column("recipe"))
        if (fault := unfit(recipe, task.answer)) is not None:
            raise ValueError(f"task {task.id} can't be judged: {fault}")
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return 0.0
        answer = extract(trajectory.response, self.options.answer)
        if answer is None:
            return 0.0
        score = answer_score(recipe, answer)
        return score if self.options.partial else float(score == 1.0)


def answer_score(recipe: Recipe, answer: str) -> float:
    """Score an answer from 0 to 1 with its set's rule; 0 if the answer fails the set's check or the rule raises."""
    admitted = ADMITTED.get(recipe.set)
    if admitted is not None and not admitted(answer):
        return 0.0
    try:
        score = set_score(recipe, answer)
    except (OSError, ImportError, MemoryError):
        raise  # not caused by the answer
    except Exception:  # rules raise many types of errors for a text that they can't parse
        return 0.0
    return min(max(0.0, score), 1.0)  # this order of arguments turns NaN into 0


@lru_cache(ENTRIES_KEPT)
def _own_answer_pays(recipe: Recipe) -> bool:
    return answer_score(recipe, entry(recipe)["answer"]) == 1.0


def unfit(recipe: Recipe, answer: object) -> str | None:
    """Return why a task with this recipe and gold answer can't be judged; None if it can be judged.

    Tasks without a gold answer, which only barred sets have, are judged without this check.
    """
    own = entry(recipe)["answer"]
    if answer != own:
        fix = "use the version of reasoning-gym that the tasks were made with"
        return f"its recipe generates the answer {own!r} here, but the task has the answer {answer!r}; {fix}"
    if own is not None and not _own_answer_pays(recipe):
        return (
            f"the set {recipe.set!r} does not accept its own answer {own!r}; leave the set out, or change its options"
        )
    return None


def extract(response: str, form: Form) -> str | None:
    """Return the answer in a response without outer white space; None if the response has no answer."""
    if form == "tags":
        answers = _TAGGED.findall(response)
        return answers[-1].strip() if answers else None
    if form == "boxed":
        found = _last_boxed(response)
        return None if found is None else found.strip()
    text = response.strip()
    if not text:
        return None
    return text if form == "whole" else text.splitlines()[-1].strip()


def _last_boxed(response: str) -> str | None:
    r"""Return the content of the `\boxed{}` that closes last, which of two nested boxes is the outer box."""
    found, starts = None, list[int]()
    for mark in _BOX_OR_BRACE.finditer(response):
        if mark[0] != "}":
            starts.append(mark.end() if len(mark[0]) > 1 else -1)
        elif starts and (start := starts.pop()) >= 0:
            found = response[start : mark.start()]
    return found
