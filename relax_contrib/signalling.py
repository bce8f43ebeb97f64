# SPDX-License-Identifier: Apache-2.0
"""A signalling game (Lewis, 1969): a speaker sees a meaning and says a signal, a listener hears it and names the meaning.

One policy plays both roles, each in a conversation of its own, so that an episode has two rows: the listener's begins with
`session.restart` and shares no token with the speaker's. Both are paid alike, 1 where the meaning comes across. No signal means
anything at first: a convention is what is learnt.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import field_validator

from relax_core.api import Environment, Message, Options, Session, Task


class SignallingOptions(Options):
    """Options of `signalling`."""

    signals: tuple[str, ...]
    """Words that the speaker may say; anything else ends the episode without pay, so that naming the meaning is no way out."""
    listener: str = "{signal}"
    """The listener's prompt, with `{signal}` in it."""

    @field_validator("listener")
    @classmethod
    def _has_its_place(cls, listener: str) -> str:
        if "{signal}" not in listener:
            raise ValueError("it has no {signal}, so that the listener would hear nothing")
        return listener


class Signalling(Environment[SignallingOptions]):
    """One episode; the task's prompt is the speaker's, its `answer` the meaning.

    speaker's turn -> listener's turn -> paid | speaker's turn is no signal -> not paid
    """

    in_process: ClassVar[bool] = True
    gives_reward: ClassVar[bool] = True
    needs_columns: ClassVar[tuple[str, ...]] = ("answer",)

    async def run(self, task: Task, seed: int, session: Session) -> None:
        said = await session.generate()
        signal = said.text.strip()
        if signal not in self.options.signals:
            session.reward(0.0)
            return
        prompt = self.options.listener.replace("{signal}", signal)
        listener = session.restart((Message("user", prompt),), name="listener")
        heard = await listener.generate()
        listener.reward(float(heard.text.strip() == task.answer))
