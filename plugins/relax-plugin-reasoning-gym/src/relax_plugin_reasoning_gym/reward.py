# SPDX-License-Identifier: Apache-2.0
"""The reward `reasoning-gym`: the rule of the task's own set, `score_answer`, judges the answer that a response gives.

The rules pay prose, length and parts of an answer to a degree, so only a full score counts unless `partial` is set.
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
    r"""The answer in a response: between its last `<answer>` and `</answer>`, in its last `\boxed{}`, its last line with
    text, or the whole of it. A response that has none is 0."""
    partial: bool = False
    """Give the score of the set's rule as it is, from 0 to 1; several sets pay prose and length. False: 1 for a full score,
    else 0."""
    truncated: bool = False
    """Judge a response that a limit cut off; otherwise it scores 0: finishing is part of the task."""


class ReasoningGymReward(Reward[ReasoningGymRewardOptions]):
    """Gives 1 when the set's rule accepts the answer in full, else 0.

    A task is judged only where its own answer gets a full score here. Some rules answer every failure of theirs with a low
    score, so a broken installation would otherwise look like a policy that is always wrong.
    """

    needs_columns = ("set", "recipe")

    def __init__(self, options: ReasoningGymRewardOptions | None = None) -> None:
        super().__init__(options)
        import reasoning_gym  # noqa: F401 - now, since it takes seconds, and the first sample has a deadline

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
    """Score an answer from 0 to 1 by its set's rule; one that the rule may not read, or can't, is 0."""
    admitted = ADMITTED.get(recipe.set)
    if admitted is not None and not admitted(answer):
        return 0.0
    try:
        score = set_score(recipe, answer)
    except (OSError, ImportError, MemoryError):
        raise  # says nothing about the answer
    except Exception:  # rules raise errors of all kinds over a text that they can't read
        return 0.0
    return min(max(0.0, score), 1.0)  # in this order NaN is 0


@lru_cache(ENTRIES_KEPT)
def _own_answer_pays(recipe: Recipe) -> bool:
    return answer_score(recipe, entry(recipe)["answer"]) == 1.0


def unfit(recipe: Recipe, answer: object) -> str | None:
    """Say why a task with this recipe and answer can't be judged; None where it can.

    A set whose tasks have no answer (it is barred) is judged all the same.
    """
    own = entry(recipe)["answer"]
    if answer != own:
        fix = "use the version of reasoning-gym that the tasks were made with"
        return f"its recipe makes the answer {own!r} here, and the task says {answer!r}; {fix}"
    if own is not None and not _own_answer_pays(recipe):
        return (
            f"the set {recipe.set!r} does not accept its own answer {own!r}; leave the set out, or change its options"
        )
    return None


def extract(response: str, form: Form) -> str | None:
    """Find the answer of a response, without white space around it; None where it gives none."""
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
    """Find what the box holds that is closed last, which is the outer one of two that are closed in each other."""
    found, starts = None, list[int]()
    for mark in _BOX_OR_BRACE.finditer(response):
        if mark[0] != "}":
            starts.append(mark.end() if len(mark[0]) > 1 else -1)
        elif starts and (start := starts.pop()) >= 0:
            found = response[start : mark.start()]
    return found
