# SPDX-License-Identifier: Apache-2.0
"""Guess the number: a small multi-turn environment in which the policy finds a hidden letter of the alphabet.

Each guess gets a hint: `<` if the hidden letter is before the guess, `>` if it is after, `=` if the guess is right.
Binary search finds 15 of 16 letters within four guesses; guesses that ignore the hints find about one in five.
"""

from __future__ import annotations

from string import ascii_lowercase
from typing import ClassVar

from pydantic import Field

from relax_core.api import Action, Environment, Observation, Options, Step, Task

NO_GUESS = "!"
"""Reply to an answer that is not one of the letters; the answer still counts as a guess."""


class GuessNumberOptions(Options):
    """Options of `guess-number`."""

    size: int = Field(16, ge=2, le=26)
    """Number of possible letters, from `a` on."""
    guesses: int = Field(4, ge=1)
    """Number of guesses after which the game is lost."""


class GuessNumber(Environment[GuessNumberOptions]):
    """A game with a hidden letter, the task's `answer`; the reward is 1 if a guess is right, else 0."""

    in_process: ClassVar[bool] = True
    gives_reward: ClassVar[bool] = True
    needs_columns: ClassVar[tuple[str, ...]] = ("answer",)

    async def reset(self, task: Task, seed: int) -> Observation | None:
        letters = ascii_lowercase[: self.options.size]
        if not isinstance(task.answer, str) or len(task.answer) != 1 or task.answer not in letters:
            raise ValueError(
                f"task {task.id}: answer {task.answer!r} is not one of the letters {letters}; correct the column answer"
            )
        self._letters, self._secret, self._left = letters, task.answer, self.options.guesses
        self._low, self._high = 0, len(letters)
        return None

    async def step(self, action: Action) -> Step:
        guess = action.text.strip()
        self._left -= 1
        hit = guess == self._secret
        info = {"guesses": self.options.guesses - self._left}
        observation = Observation(self._hint(guess), state=self._state(guess))
        return Step(observation, hit or self._left == 0, float(hit), info)

    def _state(self, guess: str) -> str:
        """Return the remaining letters and guesses as text, so that turns in equal states can be compared."""
        if self._hint(guess) == "<":
            self._high = min(self._high, self._letters.index(guess))
        elif self._hint(guess) == ">":
            self._low = max(self._low, self._letters.index(guess) + 1)
        return f"{self._letters[self._low : self._high]} in {self._left}"

    def _hint(self, guess: str) -> str:
        if len(guess) != 1 or guess not in self._letters:
            return NO_GUESS
        return "=" if guess == self._secret else "<" if self._secret < guess else ">"
