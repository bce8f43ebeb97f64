# SPDX-License-Identifier: Apache-2.0
"""An environment of Gymnasium, played in words: what it shows becomes text or an image, what the policy writes an action.

Rewards are the environment's own and credited turn by turn. Nothing is clipped or guessed: an action that can't be read is
answered with the reason and costs a turn.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from relax_core.api import Action, Environment, Observation, Options, Part, Step, Task

if TYPE_CHECKING:  # it takes half a second
    from gymnasium import Env

COLUMN = "gymnasium"
"""Column of the task file that a task may say its environment in."""
_PLACE = re.compile(r"\{(\w+)\}")
PLACES = ("shown", "value", "reward", "actions", "turn")


class GymnasiumOptions(Options):
    """Options of `gymnasium`."""

    id: str = "FrozenLake-v1"
    """The environment, as Gymnasium names it; `module:Name-v0` imports the module first, which registers it."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment, such as `{is_slippery = false}`."""
    actions: tuple[str, ...] = ()
    """Names of numbered actions, in their order: `["left", "down", "right", "up"]`. Numbers are always understood."""
    max_steps: int = Field(0, ge=0)
    """Turns of the policy, unreadable ones included, after which the episode is cut off; 0: the environment's own limit."""
    show: Literal["auto", "render", "value"] = "auto"
    """`{shown}` is the environment's rendering as text, or the value of the observation; `auto`: rendering where it has one."""
    opening: str = "{shown}\n\nActions: {actions}. End your answer with one of them in <action></action>."
    """The first observation, behind the task's prompt; places as in `template`."""
    template: str = "{shown}"
    """Later observations: `{shown}`, `{value}`, `{reward}` of the turn, `{actions}`, `{turn}`."""
    digits: int = Field(3, ge=0, le=12)
    """Decimal places of numbers in `{value}`."""
    image: Literal["none", "render", "observation"] = "none"
    """An image before each text: the environment's picture of itself, or its observation where that is pixels."""
    invalid: Literal["say", "end"] = "say"
    """An action that can't be read: say why and go on, or end the episode."""
    invalid_reward: float = 0.0
    """Reward of such a turn. Where steps cost, as in Taxi and CliffWalking, it must cost more than they do, or saying nothing
    pays."""
    seed_of: Literal["sample", "task"] = "sample"
    """`task`: all samples of a task, in all epochs, begin alike and meet the same chance."""

    @model_validator(mode="after")
    def _plausible(self) -> GymnasiumOptions:
        for name, text in (("opening", self.opening), ("template", self.template)):
            if wrong := [place for place in _PLACE.findall(text) if place not in PLACES]:
                raise ValueError(f"{name} has no place {{{wrong[0]}}}; there are {', '.join(PLACES)}")
        if not math.isfinite(self.invalid_reward):
            raise ValueError("invalid_reward is a finite number")
        if len({name.casefold() for name in self.actions}) < len(self.actions):
            raise ValueError("two actions have the same name")
        return self


class TaskEnvironment(Options):
    """The column `gymnasium` of a task: what it names wins over the options."""

    id: str = ""
    """The environment; with another than the options', the options' `kwargs` and `actions` do not apply."""
    kwargs: dict[str, Any] = {}
    """Its arguments."""
    actions: tuple[str, ...] = ()
    """Names of its actions."""
    seed: int = Field(0, ge=0)
    """Beginning and chance of all samples of the task."""


class Gymnasium(Environment[GymnasiumOptions]):
    """One episode.

    reset -> (step ...) -> terminated | truncated | cut off by max_steps | ended by an unreadable action
    """

    gives_reward: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "gymnasium",
        "relax_plugin_gymnasium.spaces",
        "relax_plugin_gymnasium.pictures",
    )
    _made: Any = None

    @classmethod
    async def open(cls, options: GymnasiumOptions) -> object:
        """Refuse an environment that does not exist or has no words, before the first sample asks for it."""
        make(options.id, options.kwargs, options.actions, options).close()
        return None

    async def reset(self, task: Task, seed: int) -> Observation | None:
        options, column = self.options, task.metadata.get(COLUMN)
        try:
            row = TaskEnvironment.model_validate({} if column is None else column).model_dump(exclude_unset=True)
            own = not row.get("id") or row["id"] == options.id
            self._names = row.get("actions", options.actions if own else ())
            kwargs = row.get("kwargs", options.kwargs if own else {})
            self._made = make(row.get("id") or options.id, kwargs, self._names, options)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ValueError(
                f"task {task.id}: column {COLUMN} says {column!r}, which is no environment: {wrong}"
            ) from error
        except ValueError as error:
            raise ValueError(f"task {task.id}: {error}" if column is not None else str(error)) from error
        chance = row.get("seed", zlib.crc32(task.id.encode()) if options.seed_of == "task" else seed)
        self._turn = self._unreadable = 0
        self._value, _ = self._made.reset(seed=chance % 2**32)
        return self._observation(options.opening, 0.0)

    async def step(self, action: Action) -> Step:
        from relax_plugin_gymnasium.spaces import UnreadableAction, actions_of, read_action

        self._turn += 1
        cut_off = self._turn == self.options.max_steps
        try:
            chosen = read_action(self._made.action_space, action.text, self._names)
        except UnreadableAction as error:
            self._unreadable += 1
            why = f"No action: {error}. Actions: {actions_of(self._made.action_space, self._names)}."
            done = self.options.invalid == "end" or cut_off
            return Step(why, done, self.options.invalid_reward, self._info(False, cut_off))
        self._value, reward, terminated, truncated, _ = self._made.step(chosen)
        if not math.isfinite(reward):
            raise RuntimeError(f"{self._made.spec} gave the reward {reward}; it must be a finite number")
        shown = self._observation(self.options.template, float(reward))
        truncated = bool(truncated) or (cut_off and not terminated)
        return Step(shown, bool(terminated) or truncated, float(reward), self._info(bool(terminated), truncated))

    async def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _info(self, terminated: bool, truncated: bool) -> dict[str, Any]:
        return {"terminated": terminated, "truncated": truncated, "turns": self._turn, "unreadable": self._unreadable}

    def _observation(self, template: str, reward: float) -> Observation:
        from relax_plugin_gymnasium.pictures import image, marked
        from relax_plugin_gymnasium.spaces import actions_of, plain, untold

        made, options = self._made, self.options
        pixels = options.image == "observation"
        told = not pixels and not untold(made.observation_space)
        value = (
            json.dumps(plain(made.observation_space, self._value, options.digits), ensure_ascii=False) if told else ""
        )
        shown = value
        if made.render_mode == "ansi":
            shown = marked(str(made.render()))
        said = {
            "shown": shown, "value": value, "reward": f"{reward:g}", "turn": str(self._turn),
            "actions": actions_of(made.action_space, self._names),
        }  # fmt: skip
        text = _PLACE.sub(lambda place: said[place[1]], template).strip("\n")
        if options.image == "none":
            return Observation(text, state=value)
        picture = image(self._value if pixels else made.render())
        return Observation((Part(media=picture), Part(text)), state=value)


def make(name: str, kwargs: dict[str, Any], actions: tuple[str, ...], options: GymnasiumOptions) -> Env[Any, Any]:
    """Make an environment that can be told and played. Raises ValueError for one that can't, with what to change."""
    import gymnasium

    from relax_plugin_gymnasium.spaces import untold

    wanted = "rgb_array" if options.image == "render" else "" if options.show == "value" else "ansi"
    try:
        made = gymnasium.make(name, disable_env_checker=True, **kwargs)
        modes = made.metadata.get("render_modes", [])
        if wanted in modes:  # which only its maker can tell it
            made.close()
            made = gymnasium.make(name, disable_env_checker=True, render_mode=wanted, **kwargs)
    except Exception as error:
        raise ValueError(
            f"Gymnasium does not make {name} with {kwargs}: {type(error).__name__}: {error}; correct id or kwargs"
        ) from error
    mode = made.render_mode or ""
    wrong = ""
    pixels = made.observation_space
    if part := untold(made.action_space):
        wrong = f"its actions are {part} which can't be read from text"
    elif options.image == "render" and mode != "rgb_array":
        wrong = f'it has no picture of itself, only {modes}; image = "render" needs one'
    elif options.image == "observation" and len(pixels.shape or ()) not in (2, 3):
        wrong = f'its observations are {pixels}, no pixels; image = "observation" needs them'
    elif options.show == "render" and mode != "ansi":
        wrong = f'it has no rendering as text, only {modes}; show = "render" needs one'
    elif options.image == "none" and mode != "ansi" and (part := untold(made.observation_space)):
        wrong = f'its observations are {part} which can\'t be told in text; image = "observation" shows pixels'
    elif actions and getattr(made.action_space, "n", 0) != len(actions):
        wrong = f"its actions are {made.action_space}, and {len(actions)} names were given"
    if wrong:
        made.close()
        raise ValueError(f"{name} of Gymnasium can't be played: {wrong}")
    return made
