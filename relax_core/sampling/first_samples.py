# SPDX-License-Identifier: Apache-2.0
"""Facts about the first tasks of a run, as plain data for the checks of step 1 (`observe.first_step`).

`stops` are the stop tokens as (id, text), `task_facts` and `answer_facts` describe tasks. `roles.first_rows` describes rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.family import ModelFamily
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Trajectory
from relax_core.data.row_proof import SHOWN_TEXT, prompt_faults, shared
from relax_core.rewards.host import ScoredSample
from relax_core.rewards.scorer import RewardScorer

PROBE = "x"
"""Text of the turns with which the end of a turn is rendered."""
OTHER_PROBE = "1"
"""Text of another user's turn: the text after the policy's turn is the same up to the user's words."""
MARK = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|<\uff5c[^<>\s]{1,40}\uff5c>")
"""A text that is one special token of the model families that use it."""


# -- tasks: template and tokenizer -----------------------------------------------------------------------------------


def stops(family: ModelFamily) -> list[tuple[int, str]]:
    """Return the stop tokens of a family with their texts."""
    return [(token, family.decode((token,), skip_special=False)) for token in family.stop_tokens]


def tokenizer_facts(family: ModelFamily) -> dict[str, object]:
    """Describe how the tokenizer fits the model's configuration.

    Keys: `tokens`, the tokenizer's size; `foreign`, the number of tokens that the model lacks; `misread_ends`, the
    model's end-of-sequence ids with their texts if the tokenizer reads all of them as ordinary text.
    """
    misread = [*family.misread_ends.items()]
    return {"tokens": family.vocab_size, "foreign": len(family.foreign_tokens), "misread_ends": misread}


def task_facts(
    task: Task, tools: Sequence[Tool], family: ModelFamily, own: ModelFamily | None = None
) -> dict[str, object]:
    """Describe how the prompt of a task is rendered, without its media. `tools`: the tools that the prompt shows.

    `own`: the family of the model folder's tokenizer if the run uses another one, else None. Keys: `task`; `prompt_faults`, the
    differences between template and tokens; `other_ids`, the first token that `own` reads otherwise, empty for none
    and None without `own`; for a chat `turn_end`, the token that ends the policy's turn as text, empty for none,
    `user_end`, the stop token that ends a user's turn, `closing`, the text after the policy's turn, and `split_marks`,
    texts like special tokens that are several tokens: (text, count).
    """
    tokens = family.start(task.prompt, tools).tokens
    written = family.text(task.prompt, tools)
    facts: dict[str, Any] = {
        "task": task.id, "prompt_faults": [*prompt_faults(family, task.prompt, tools, tokens)],
        "other_ids": None if own is None else _other_ids(written, family, own),
    }  # fmt: skip
    return facts if isinstance(task.prompt, str) else facts | _turn_end(task.prompt, written, family)


def own_tokenizer(family: ModelFamily, path: str | Path, tokenizer: str | Path | None) -> ModelFamily | None:
    """Return the family of a model folder's tokenizer if the run uses another one, else None; also None for a broken file.

    `family`: the run's family, whose class opens the folder.
    """
    if tokenizer is None:
        return None
    try:
        own = type(family)(family.options)
        own.open({"path": str(path)})
        return own
    except ConfigError:  # the folder has no tokenizer that can be read, and the run needs none
        return None


def _other_ids(text: str, family: ModelFamily, own: ModelFamily) -> str:
    used, known = family.encode(text), own.encode(text)
    if used == known:
        return ""
    at = shared(used, known)
    if at == min(len(used), len(known)):
        return f"{len(used)} tokens instead of {len(known)}"
    shown = family.decode(used[at : at + 1], skip_special=False)
    return f"token {at} is {used[at]} for {shown!r} instead of {known[at]}"


def _turn_end(prompt: Sequence[Message], written: str, family: ModelFamily) -> dict[str, object]:
    """Render the text after a turn of the policy; return {} if the template refuses so short a chat."""
    stop = family.stop_tokens
    cut = next((token for token in family.encode(PROBE) if token not in stop), None)
    try:
        chat = (*prompt, Message("assistant", PROBE))
        asked = (Message("user", PROBE),)
        closing, after = family.delta(chat, asked, cut).tokens, family.delta(chat, asked).tokens
        other = family.delta(chat, (Message("user", OTHER_PROBE),), cut).tokens
    except RelaxError:
        return {}
    dropped = closing[: len(closing) - len(after)]  # the family drops the end of a turn that the policy has sampled
    before = shared(closing, other)  # a stop token after this place may end the user's turn
    end = dropped[-1:] or tuple(token for token in closing[:before] if token in stop)[:1]
    user_end = tuple(token for token in closing[before:] if token in stop)[:1]
    said = "".join(message.text for message in prompt)
    marks = [mark for mark in dict.fromkeys(MARK.findall(written)) if mark not in said]
    counts = [(mark, len(family.encode(mark))) for mark in marks]
    return {
        "turn_end": family.decode(end, skip_special=False),
        "user_end": family.decode(user_end, skip_special=False),
        "closing": family.decode(closing, skip_special=False)[:SHOWN_TEXT],
        "split_marks": [(mark, count) for mark, count in counts if count > 1],
    }


# -- tasks: their answers --------------------------------------------------------------------------------------------


async def answer_facts(
    scorer: RewardScorer, groups: Sequence[tuple[Task, Sequence[Trajectory], Sequence[ScoredSample]]]
) -> list[dict[str, object] | None]:
    """Compare the reward of each task's own answer with its best sample; None for a task that can't be compared.

    `earned`: the best reward of the answer as it is written, and of the responses that rewards make of it; `text`: the
    answer; `best` and `response`: of the best judged sample. An environment's own rewards can't judge an answer.
    """
    comparable = [
        at for at, (task, samples, scores) in enumerate(groups)
        if isinstance(task.answer, str | int | float) and not any(sample.step_rewards for sample in samples)
        and any(score.outcome.judged for score in scores)
    ]  # fmt: skip
    found: list[dict[str, Any] | None] = [None] * len(groups)
    earned = await scorer.answers([groups[at][0] for at in comparable])
    for at, value in zip(comparable, earned, strict=True):
        task, samples, scores = groups[at]
        if value is None:
            continue
        judged = [
            (score.value, sample.response)
            for sample, score in zip(samples, scores, strict=True)
            if score.outcome.judged
        ]
        best, response = max(judged, key=lambda one: one[0])
        found[at] = {
            "text": str(task.answer)[:SHOWN_TEXT], "earned": value, "best": best, "response": response[:SHOWN_TEXT],
        }  # fmt: skip
    return found
