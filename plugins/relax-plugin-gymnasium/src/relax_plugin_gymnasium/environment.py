# SPDX-License-Identifier: Apache-2.0
"""The environment `gymnasium`: a Gymnasium environment that the policy sees as text or images, and plays in text.

Each turn is credited with the environment's own reward. Actions are never clipped or guessed: if an action can't be
read, the policy's next observation is the reason, and the turn counts.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from relax_core.api import Action, Environment, Observation, Options, Part, Step, Task

if TYPE_CHECKING:  # importing gymnasium takes half a second
    from gymnasium import Env

COLUMN = "gymnasium"
"""Name of the task file's column with a `TaskEnvironment`, whose fields override the options for this task."""
_PLACE = re.compile(r"\{(\w+)\}")
PLACES = ("shown", "value", "reward", "actions", "turn")


class GymnasiumOptions(Options):
    """Options of `gymnasium`."""

    id: str = "FrozenLake-v1"
    """Id of the environment in Gymnasium. `module:Name-v0` imports the module first, which must register the
    environment."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the environment, such as `{is_slippery = false}`."""
    actions: tuple[str, ...] = ()
    """Names of numbered actions, in order: `["left", "down", "right", "up"]`. Numbers are always accepted too."""
    max_steps: int = Field(0, ge=0)
    """Maximum turns of the policy, including turns with an unreadable action; 0: only the environment's own limit."""
    show: Literal["auto", "render", "value"] = "auto"
    """Content of `{shown}` in templates. `render`: the environment's rendering as text; `value`: the observation as
    JSON; `auto`: the rendering if the environment can render text, else the observation."""
    opening: str = "{shown}\n\nActions: {actions}. End your answer with one of them in <action></action>."
    """Template of the first observation, which follows the task's prompt; same placeholders as `template`."""
    template: str = "{shown}"
    """Template of later observations. Placeholders: `{shown}`, `{value}` (the observation as JSON), `{reward}` of the
    turn, `{actions}` and `{turn}`, its number."""
    digits: int = Field(3, ge=0, le=12)
    """Number of decimal places of numbers in `{value}`."""
    image: Literal["none", "render", "observation"] = "none"
    """Image before each observation's text. `render`: the environment's rendered picture; `observation`: the
    observation itself, which must be pixels."""
    invalid: Literal["say", "end"] = "say"
    """Handling of an action that can't be read. `say`: tell the policy the reason and continue. `end`: end the
    episode."""
    invalid_reward: float = 0.0
    """Reward of a turn with an unreadable action. If steps have negative rewards, as in Taxi and CliffWalking, set this
    reward lower; otherwise the policy learns to write no action."""
    seed_of: Literal["sample", "task"] = "sample"
    """Source of the environment's seed. `sample`: each sample has its own seed; `task`: all samples of a task, in all
    epochs, have the same seed."""

    @model_validator(mode="after")
    def _plausible(self) -> GymnasiumOptions:
        for name, text in (("opening", self.opening), ("template", self.template)):
            if wrong := [place for place in _PLACE.findall(text) if place not in PLACES]:
                raise ValueError(f"{name} has no placeholder {{{wrong[0]}}}; the placeholders are {', '.join(PLACES)}")
        if not math.isfinite(self.invalid_reward):
            raise ValueError("invalid_reward must be a finite number")
        if len({name.casefold() for name in self.actions}) < len(self.actions):
            raise ValueError("actions: two actions have the same name; rename one")
        return self


class TaskEnvironment(Options):
    """The fields of a task's column `gymnasium`, which override the options of the same name."""

    id: str = ""
    """Id of the environment. If it differs from the option `id`, the options `kwargs` and `actions` do not apply."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the environment."""
    actions: tuple[str, ...] = ()
    """Names of numbered actions, in order."""
    seed: int = Field(0, ge=0)
    """Seed of all samples of the task; if missing, the option `seed_of` decides."""


class Gymnasium(Environment[GymnasiumOptions]):
    """One episode of a Gymnasium environment.

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
        """Raise ValueError before the first sample if the environment does not exist or can't be written as text."""
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
                f"task {task.id}: column {COLUMN} is {column!r}, which does not describe an environment: {wrong}"
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
        from relax_plugin_gymnasium.spaces import actions_of, plain, unwritable_part

        made, options = self._made, self.options
        pixels = options.image == "observation"
        shows_value = not pixels and not unwritable_part(made.observation_space)
        value = (
            json.dumps(plain(made.observation_space, self._value, options.digits), ensure_ascii=False)
            if shows_value
            else ""
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
    """Create an environment. Raises ValueError with the fix if the options can't show or play the environment."""
    import gymnasium

    from relax_plugin_gymnasium.spaces import unwritable_part

    wanted = "rgb_array" if options.image == "render" else "" if options.show == "value" else "ansi"
    try:
        made = gymnasium.make(name, disable_env_checker=True, **kwargs)
        modes = made.metadata.get("render_modes", [])
        if wanted in modes:  # the render mode can only be set when the environment is made
            made.close()
            made = gymnasium.make(name, disable_env_checker=True, render_mode=wanted, **kwargs)
    except Exception as error:
        raise ValueError(
            f"Gymnasium can't make {name} with {kwargs}: {type(error).__name__}: {error}; correct id or kwargs"
        ) from error
    mode = made.render_mode or ""
    wrong = ""
    pixels = made.observation_space
    if part := unwritable_part(made.action_space):
        wrong = f"its actions are {part} which can't be read from text"
    elif options.image == "render" and mode != "rgb_array":
        wrong = f'it can\'t render a picture, only {modes}; image = "render" needs "rgb_array"'
    elif options.image == "observation" and len(pixels.shape or ()) not in (2, 3):
        wrong = f'its observations are {pixels}, not pixels; image = "observation" needs pixels'
    elif options.show == "render" and mode != "ansi":
        wrong = f'it can\'t render text, only {modes}; show = "render" needs "ansi"'
    elif options.image == "none" and mode != "ansi" and (part := unwritable_part(made.observation_space)):
        wrong = f'its observations are {part} which can\'t be written as text; image = "observation" shows pixels'
    elif actions and getattr(made.action_space, "n", 0) != len(actions):
        wrong = f"its actions are {made.action_space}, but option actions has {len(actions)} names"
    if wrong:
        made.close()
        raise ValueError(f"{name} of Gymnasium can't be played: {wrong}")
    return made
