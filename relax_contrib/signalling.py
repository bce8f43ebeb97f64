# SPDX-License-Identifier: Apache-2.0
"""A signalling game (Lewis, 1969): a speaker sees a meaning and says a signal, a listener names the meaning.

One policy plays both roles, each in a separate conversation, so an episode has two rows. The listener's row begins with
`session.restart` and shares no token with the speaker's. Both rows get the same reward: 1 if the listener names the
meaning, else 0. Signals have no meaning at first; the policy learns a convention.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import field_validator

from relax_core.api import Environment, Message, Options, Session, Task


class SignallingOptions(Options):
    """Options of `signalling`."""

    signals: tuple[str, ...]
    """Words that the speaker may say; a different word ends the episode with reward 0, so saying the meaning earns
    nothing."""
    listener: str = "{signal}"
    """Prompt of the listener; `{signal}` is replaced by the speaker's signal."""

    @field_validator("listener")
    @classmethod
    def _has_its_place(cls, listener: str) -> str:
        if "{signal}" not in listener:
            raise ValueError(f"listener: got {listener!r} without {{signal}}; add it, or the listener sees no signal")
        return listener


class Signalling(Environment[SignallingOptions]):
    """One episode of the game; the task's prompt is the speaker's prompt, and its `answer` is the meaning.

    speaker's turn -> listener's turn -> reward 0 or 1 | speaker's turn is not a signal -> reward 0
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
