# SPDX-License-Identifier: Apache-2.0
"""An example: a training row that somebody wrote, laid out token by token as if the policy had sampled it.

Turns of the policy are joined by the same `start` and `delta` of the model family as in a rollout, so a warm start trains
what generation will see. No file and no length limit here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.api.task import Message

Text = str | tuple[Message, ...]
TrainOn = Literal["completion", "all"]
SPEAKER = "assistant"


@dataclass(frozen=True, slots=True)
class Example:
    """One row; both are [tokens]."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    """1 where a token is trained; never the first one, which no token precedes."""

    @property
    def num_trained(self) -> int:
        return sum(self.mask)

    def cut(self, limit: int) -> Example:
        """Its first tokens."""
        return Example(self.tokens[:limit], self.mask[:limit])


def example(family: ModelFamily, prompt: Text, completion: Text | None, train_on: TrainOn = "completion") -> Example:
    """A prompt with its completion, or a conversation alone, whose assistant turns are trained.

    Raises ConfigError (field `data.train`) where there is nothing to learn from it.
    """
    if isinstance(prompt, str):
        parts = _plain(family, prompt, completion)
    else:
        given = 0 if completion is None else len(prompt)
        parts = _conversation(family, (*prompt, *_messages(completion)), given)
    tokens = tuple(token for ids, _ in parts for token in ids)
    mask = [int(trained or train_on == "all") for ids, trained in parts for _ in ids]
    mask[:1] = [0]
    return Example(tokens, tuple(mask))


def _plain(family: ModelFamily, prompt: str, completion: Text | None) -> list[tuple[tuple[int, ...], bool]]:
    if not isinstance(completion, str):
        got = (
            "nothing to answer a prompt of plain text"
            if completion is None
            else "messages behind a prompt of plain text"
        )
        raise ConfigError("data.train", got, "give the completion as text, or write the prompt as messages")
    return [(family.start(prompt).tokens, False), (family.turn(prompt, Message(SPEAKER, completion)), True)]


def _messages(completion: Text | None) -> tuple[Message, ...]:
    return (Message(SPEAKER, completion),) if isinstance(completion, str) else completion or ()


def _conversation(family: ModelFamily, messages: Sequence[Message], given: int) -> list[tuple[tuple[int, ...], bool]]:
    """Runs of tokens, and whether each is the policy's own; what follows its last turn is left out."""
    turns = [at for at, message in enumerate(messages) if at >= given and message.role == SPEAKER]
    if not turns:
        raise ConfigError(
            "data.train", "a conversation without a turn of the assistant", "add one, or give a completion"
        )
    parts = [(family.start(messages[: turns[0]]).tokens, False)]
    for at, following in zip(turns, [*turns[1:], None], strict=True):
        said = family.turn(messages[:at], messages[at])
        parts.append((said, True))
        if following is not None:
            between = family.delta(messages[: at + 1], messages[at + 1 : following], said[-1])
            parts.append((between.tokens, False))
    return parts
