# SPDX-License-Identifier: Apache-2.0
"""The environment `openenv`: an episode on an OpenEnv server, in which each turn of the policy is one action.

Each turn is credited with the server's reward for its action. After an action that does not fit the schema, the
observation is an error text. If the server fails, exceeds a deadline or raises, the outcome is `environment_error`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from relax_core.api import Action, ConfigError, Environment, Observation, Options, Secret, Step, Task, Tool
from relax_core.api.options import LITERAL
from relax_core.api.task import Message
from relax_plugin_openenv.connection import (
    INVALID,
    RAISED,
    Answer,
    EpisodeConnection,
    NotAccepted,
    ServerFailed,
    action_schema,
)

COLUMN = "openenv"
"""Name of the task file's column with a `TaskEpisode`, whose fields override the options for this task."""
TEXT = "{text}"
_PLACE = re.compile(r"\{(\w+)\}")
PLACES = ("shown", "reward", "turn", "schema")
OPENINGS = {
    "text": "{shown}",
    "tool": "{shown}",
    "json": "{shown}\n\nEnd your answer with a JSON object for this schema in <action></action>: {schema}",
}
_MARKED = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)
_SECRET_HEADERS = ("auth", "cookie", "key", "secret", "token")


class OpenEnvOptions(Options):
    """Options of `openenv`."""

    url: str = Field(pattern=r"^https?://[^/?#@]+(/[^?#]*)?$")
    """Address of the server, such as `http://host:8000`."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts of further servers of the same environment that tasks may use: `env.example.org`, `*.example.org`, or an IP
    address. Empty: tasks use only `url`."""
    headers: dict[str, Annotated[Secret | str, Field(union_mode="left_to_right")]] = {}
    """Headers of requests to `url`, which are never sent to a task's server. Write credentials as `"env:NAME"` or
    `"file:PATH"`."""
    act: Literal["json", "text", "tool"] = "json"
    """Source of a turn's action. `json`: the JSON object at the end of the turn; `text`: the option `action`, with the
    turn's text inserted; `tool`: the arguments of a call of a tool whose parameters are the server's action schema."""
    action: dict[str, Any] = {}
    """For `act = "text"`: the action, in which `{text}` stands for the turn's text, as in `{ message = "{text}" }`."""
    tool: str = Field("act", pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")
    """For `act = "tool"`: the tool's name."""
    after: str = ""
    """Marker such as `</think>`: only the text after the marker's last occurrence is read as the action, and a turn
    without the marker has no action. Empty: the whole text is read."""
    show: str = ""
    """Field of the observation that replaces `{shown}` in templates, such as `board` or `info.text`; empty: the whole
    observation as JSON."""
    opening: str = ""
    """Template of the first observation, which follows the task's prompt. Placeholders: those of `template`, and
    `{schema}`, the schema of actions. Empty: `{shown}`, and for `act = "json"` also the format of the answer."""
    template: str = "{shown}"
    """Template of later observations. Placeholders: `{shown}`, `{reward}` of the turn, and `{turn}`, its number."""
    reset: dict[str, Any] = {}
    """Further arguments of each reset; a task's own arguments override these."""
    reward: Literal["server", "rewards"] = "server"
    """Source of the reward. `server`: the server; `rewards`: only the run's `[[rewards]]`."""
    invalid_reward: float = Field(0.0, allow_inf_nan=False)
    """Reward of a turn whose action can't be read or is not accepted by the server."""
    raised: Literal["fail", "say"] = "fail"
    """Handling of an exception in the environment's own code. `fail`: the sample's outcome is `environment_error`.
    `say`: the policy gets the error text, for environments that raise if an action breaks their rules."""
    seed_of: Literal["sample", "task"] = "sample"
    """Source of an episode's seed. `sample`: each sample has its own seed; `task`: all samples of a task, in all epochs,
    have the same seed."""
    note_state: bool = False
    """Request the server's state at the end of an episode, and store the state in the sample's `info`."""
    begin_s: PositiveFloat = 60.0
    """Time limit in seconds for starting an episode, including the wait for a free session."""
    step_s: PositiveFloat = 60.0
    """Time limit for one action, in seconds."""
    max_message_mb: PositiveInt = 16
    """Maximum size of a message from the server, in MiB."""

    @field_validator("headers")
    @classmethod
    def _no_literal_credentials(cls, headers: dict[str, Secret | str]) -> dict[str, Secret | str]:
        for name, value in headers.items():
            if isinstance(value, str) and any(word in name.lower() for word in _SECRET_HEADERS):
                raise PydanticCustomError(LITERAL, f'write {name} as "env:NAME" or "file:PATH", never the value itself')
        return headers

    @model_validator(mode="after")
    def _acts_one_way(self) -> OpenEnvOptions:
        if self.act == "text" and TEXT not in json.dumps(self.action):
            raise ValueError('act = "text" needs {text} in action, such as action = { message = "{text}" }')
        if self.act != "text" and self.action:
            raise ValueError('action has no effect without act = "text"; remove it')
        for name, text in (("opening", self.opening), ("template", self.template)):
            if wrong := [place for place in _PLACE.findall(text) if place not in PLACES]:
                raise ValueError(f"{name} has no placeholder {{{wrong[0]}}}; the placeholders are {', '.join(PLACES)}")
        return self


class TaskEpisode(Options):
    """The fields of a task's column `openenv`, which override the options."""

    url: str = Field("", pattern=r"^(https?://[^/?#@]+(/[^?#]*)?)?$")
    """Address of another server of the same environment, on a host in `allowed_hosts`; empty: the option `url`."""
    reset: dict[str, Any] = {}
    """Arguments of the reset, added to those of the option `reset`."""
    seed: int = Field(-1, ge=-1)
    """Seed of all samples of the task; -1: the option `seed_of` decides."""


class OpenEnv(Environment[OpenEnvOptions]):
    """An episode on an OpenEnv server: `reset -> (step ...) -> done`."""

    gives_reward: ClassVar[bool] = True
    _connection: EpisodeConnection | None = None

    @classmethod
    async def find_tools(cls, options: OpenEnvOptions) -> tuple[Tool, ...]:
        """Return a tool whose parameters are the server's action schema; no tool unless `act` is "tool"."""
        if options.act != "tool":
            return ()
        return (Tool(options.tool, await _schema(options), "Act in the environment.", options.url),)

    @classmethod
    async def open(cls, options: OpenEnvOptions) -> str:
        """Return the action schema as JSON. Raises ConfigError before any sample if the server can't be reached."""
        return json.dumps(await _schema(options), ensure_ascii=False)

    async def reset(self, task: Task, seed: int) -> Observation | None:
        options, column = self.options, task.metadata.get(COLUMN)
        try:
            own = TaskEpisode.model_validate({} if column is None else column)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ValueError(
                f"task {task.id}: column {COLUMN} is {column!r}, which does not describe an episode: {wrong}"
            ) from error
        url = own.url or options.url
        if own.url:
            host = urlsplit(own.url).hostname or ""
            if not any(fnmatchcase(host, allowed.lower()) for allowed in options.allowed_hosts):
                fix = f'set allowed_hosts = ["{host}"] in [environment] to allow this host'
                got = f"task {task.id} with {own.url}, whose host is not allowed"
                raise ConfigError("environment.allowed_hosts", got, fix)
        headers = {} if own.url else _revealed(options)
        chance = own.seed if own.seed >= 0 else zlib.crc32(task.id.encode()) if options.seed_of == "task" else seed
        self._turn, self._invalid, self._rewarded = 0, 0, False
        self._connection = EpisodeConnection(url, headers, options.max_message_mb << 20)
        data = {**options.reset, **own.reset, "seed": chance % 2**31}
        answer = await self._connection.begin(data, options.begin_s)
        if answer.done:
            raise ServerFailed(f"OpenEnv server {url}: the episode was over when it began")
        return Observation(self._shown(options.opening or OPENINGS[options.act], answer))

    async def step(self, action: Action) -> Step:
        assert self._connection is not None
        self._turn += 1
        try:
            chosen = self._chosen(action)
        except ValueError as error:
            return self._refused(action, str(error))
        try:
            answer = await self._connection.step(chosen, self.options.step_s)
        except NotAccepted as error:
            if error.code == INVALID or (error.code == RAISED and self.options.raised == "say"):
                return self._refused(action, str(error))
            fix = '; if it raises because an action breaks its rules, set raised = "say"' * (error.code == RAISED)
            raise ServerFailed(f"OpenEnv server {self._connection.url}: {error.code}: {error}{fix}") from error
        self._rewarded |= answer.reward is not None
        judged = self.options.reward == "server"
        if answer.done and judged and not self._rewarded:
            fix = 'set reward = "rewards" and let [[rewards]] judge'
            raise ServerFailed(f"OpenEnv server {self._connection.url}: the episode ended without a reward; {fix}")
        info: dict[str, Any] = {"turns": self._turn, "invalid": self._invalid}
        if answer.done and self.options.note_state:
            info["state"] = await self._connection.state(self.options.step_s)
        shown = self._heard(action, self._shown(self.options.template, answer))
        return Step(shown, answer.done, answer.reward if judged else None, {COLUMN: info})

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def _chosen(self, action: Action) -> dict[str, Any]:
        """Return the action of a turn. Raises ValueError, whose text the policy sees, if the turn has no action."""
        options, text = self.options, action.text
        if options.act == "tool":
            if not action.tool_calls:
                raise ValueError(f"call {options.tool}, once")
            return dict(action.tool_calls[0].arguments)
        if options.after:
            _, mark, text = text.rpartition(options.after)
            if not mark:
                raise ValueError(f"there is no {options.after}, after which the action stands")
        if options.act == "text":
            return {name: _filled(value, text.strip()) for name, value in options.action.items()}
        marked = _MARKED.findall(text) or _FENCED.findall(text) or [text]
        try:
            found = json.loads(marked[-1])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the turn has no JSON object in <action></action>: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("the action is not a JSON object")
        return found

    def _refused(self, action: Action, why: str) -> Step:
        self._invalid += 1
        reward = self.options.invalid_reward if self.options.reward == "server" else None
        info = {COLUMN: {"turns": self._turn, "invalid": self._invalid}}
        return Step(self._heard(action, f"No action was taken: {why}."), False, reward, info)

    def _heard(self, action: Action, text: str) -> Observation:
        """Return a text as the next observation; if the policy called the tool, as the tool's result."""
        if not action.tool_calls:
            return Observation(text)
        first, *further = action.tool_calls
        only = "error: one action a turn is taken, and this was not"
        return Observation(
            messages=(
                Message("tool", text, name=first.name),
                *(Message("tool", only, name=call.name) for call in further),
            )
        )

    def _shown(self, template: str, answer: Answer) -> str:
        found: Any = {name: value for name, value in answer.observation.items() if name != "metadata" or value}
        for name in filter(None, self.options.show.split(".")):
            if not isinstance(found, Mapping) or name not in found:
                fix = f"it has {', '.join(answer.observation)}; correct show"
                raise ValueError(f"environment.show: the observation has no {self.options.show!r}: {fix}")
            found = found[name]
        shown = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        said = {
            "shown": shown, "reward": "" if answer.reward is None else f"{answer.reward:g}", "turn": str(self._turn),
            "schema": str(self.shared),
        }  # fmt: skip
        return _PLACE.sub(lambda place: said[place[1]], template)


def _filled(value: Any, text: str) -> Any:
    """Return a copy of a JSON value in which `text` replaces `{text}` in all strings."""
    if isinstance(value, str):
        return value.replace(TEXT, text)
    if isinstance(value, Mapping):
        return {name: _filled(one, text) for name, one in value.items()}
    return [_filled(one, text) for one in value] if isinstance(value, list | tuple) else value


def _revealed(options: OpenEnvOptions) -> dict[str, str]:
    return {name: one.reveal() if isinstance(one, Secret) else one for name, one in options.headers.items()}


async def _schema(options: OpenEnvOptions) -> dict[str, Any]:
    try:
        return await action_schema(options.url, _revealed(options), options.begin_s)
    except ServerFailed as error:
        fix = "start the server, or correct url in [environment]"
        raise ConfigError("environment.url", str(error), fix) from error
