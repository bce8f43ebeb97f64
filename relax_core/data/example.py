# SPDX-License-Identifier: Apache-2.0
"""An example: a training row that somebody wrote, laid out token by token as if the policy had sampled it.

Turns of the policy are joined by the same `start` and `delta` of the model family as in a rollout, so a warm start trains
what generation will see. No file and no length limit here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.task import Message
from relax_core.data.media_pipeline import media_of
from relax_core.data.placeholders import misplaced

Text = str | tuple[Message, ...]
TrainOn = Literal["completion", "all"]
SPEAKER = "assistant"
Hold = Callable[[Rendered, Sequence[Message]], Rendered]
"""Puts as many tokens as the messages' media take where a rendering has one for each."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row; both are [tokens]."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    """1 where a token is trained; never the first one, which no token precedes."""
    media: tuple[str, ...] = ()
    """Of the media that it shows, in order: keys where they are held, else references."""

    @property
    def num_trained(self) -> int:
        return sum(self.mask)

    def cut(self, limit: int) -> Example:
        """Its first tokens; no medium is cut off or in two."""
        return self if self.media else Example(self.tokens[:limit], self.mask[:limit])


class _Run(NamedTuple):
    """Tokens of one kind, and the messages that they render."""

    rendered: Rendered
    shows: Sequence[Message] = ()
    trained: bool = False


def example(
    family: ModelFamily,
    prompt: Text,
    completion: Text | None,
    train_on: TrainOn = "completion",
    hold: Hold | None = None,
) -> Example:
    """A prompt with its completion, or a conversation alone, whose assistant turns are trained.

    Without `hold`, each medium has one token. Raises ConfigError (field `data.train`) where there is nothing to learn from it.
    """
    if isinstance(prompt, str):
        runs = _plain(family, prompt, completion)
    else:
        given = 0 if completion is None else len(prompt)
        runs = _conversation(family, said_in(prompt, completion), given)
    runs = [run._replace(rendered=(hold or _one_each(family))(run.rendered, run.shows)) for run in runs]
    return _joined(runs, train_on == "all", frozenset(family.placeholders.values()))


def _one_each(family: ModelFamily) -> Hold:
    """Leaves a rendering as it is, after a look at its media's places."""

    def look(rendered: Rendered, messages: Sequence[Message]) -> Rendered:
        kinds = [media.kind for media in media_of(messages)]
        if family.placeholders and (fault := misplaced(rendered.tokens, kinds, family.placeholders)):
            raise ConfigError("data.train", fault.partition("; ")[0], fault.partition("; ")[2])
        return rendered

    return look


def said_in(prompt: Text, completion: Text | None) -> tuple[Message, ...]:
    """All messages of a row, in order; those of plain text show nothing."""
    return () if isinstance(prompt, str) else (*prompt, *_messages(completion))


def _joined(runs: Sequence[_Run], all_trained: bool, places: frozenset[int]) -> Example:
    tokens = tuple(token for run in runs for token in run.rendered.tokens)
    trained = [run.trained or all_trained for run in runs for _ in run.rendered.tokens]
    mask = [int(wanted and token not in places) for token, wanted in zip(tokens, trained, strict=True)]
    mask[:1] = [0]
    return Example(tokens, tuple(mask), tuple(medium for run in runs for medium in run.rendered.media))


def _plain(family: ModelFamily, prompt: str, completion: Text | None) -> list[_Run]:
    if not isinstance(completion, str):
        got = (
            "nothing to answer a prompt of plain text"
            if completion is None
            else "messages behind a prompt of plain text"
        )
        raise ConfigError("data.train", got, "give the completion as text, or write the prompt as messages")
    said = Rendered(family.turn(prompt, Message(SPEAKER, completion)))
    return [_Run(family.start(prompt)), _Run(said, trained=True)]


def _messages(completion: Text | None) -> tuple[Message, ...]:
    return (Message(SPEAKER, completion),) if isinstance(completion, str) else completion or ()


def _conversation(family: ModelFamily, messages: Sequence[Message], given: int) -> list[_Run]:
    """What follows the policy's last turn is left out."""
    turns = [at for at, message in enumerate(messages) if at >= given and message.role == SPEAKER]
    if not turns:
        raise ConfigError(
            "data.train", "a conversation without a turn of the assistant", "add one, or give a completion"
        )
    runs = [_Run(family.start(messages[: turns[0]]), messages[: turns[0]])]
    for at, following in zip(turns, [*turns[1:], None], strict=True):
        said = family.turn(messages[:at], messages[at])
        runs.append(_Run(Rendered(said), trained=True))
        if following is not None:
            heard = messages[at + 1 : following]
            runs.append(_Run(family.delta(messages[: at + 1], heard, said[-1]), heard))
    return runs
