# SPDX-License-Identifier: Apache-2.0
"""The reward `remote`: posts the sample to an HTTP service of the user, which answers with the score.

The answer is `{"score": 0.5, "parts": {"style": 1}}` or a number. A different answer, or a redirect, fails the sample
and is never a score of 0. Failed connections and the statuses 429 and 5xx are retried; after the last attempt they
raise InfrastructureError. A sample's deadline (`timeout_s` of `[[rewards]]`) covers all attempts, and the wait while
`concurrency` requests are in progress.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from relax_core.api import InfrastructureError, Message, Options, Outcome, Reward, Score, Secret, Task, Trajectory
from relax_core.api.options import LITERAL
from relax_core.api.reward import LARGEST_REWARD

if TYPE_CHECKING:
    import httpx

LONGEST_BACKOFF_S = 30.0
_SECRET_HEADERS = ("auth", "cookie", "key", "secret", "token")


class RemoteOptions(Options):
    """Options of `remote`."""

    url: str = Field("", pattern="^(https?://.+)?$")
    """Required. Address of the service, `http://...` or `https://...`."""
    headers: dict[str, Annotated[Secret | str, Field(union_mode="left_to_right")]] = {}
    """Headers of each request. Write secrets as `env:NAME` or `file:PATH`, so that no file of the run holds the value.
    For `env:NAME`, list the variable in `inherit_env` of `[[rewards]]`, so that the reward's process can read it."""
    request_timeout_s: PositiveFloat = 30.0
    """Seconds after which connecting, sending, or waiting for data fails. Only a timeout in connecting is retried."""
    retries: NonNegativeInt = 3
    """Number of further attempts after a failed connection, or after an answer with status 429 or 5xx."""
    backoff_s: PositiveFloat = 0.5
    """Seconds before the second attempt. The pause doubles with each further attempt, up to 30 s; each pause is
    shortened at random, by up to half."""
    concurrency: PositiveInt = 64
    """Maximum number of simultaneous requests from one process."""
    truncated: bool = True
    """Send truncated responses too, marked `truncated`; False: a truncated response scores 0 without a request."""

    @field_validator("headers")
    @classmethod
    def _no_literal_credentials(cls, headers: dict[str, Secret | str]) -> dict[str, Secret | str]:
        for name, value in headers.items():
            if isinstance(value, str) and any(word in name.lower() for word in _SECRET_HEADERS):
                raise PydanticCustomError(LITERAL, f'write {name} as "env:NAME" or "file:PATH", never the value itself')
        return headers


class Remote(Reward[RemoteOptions]):
    """A reward that a service computes.

    Invariant: all samples are judged in one event loop, through one client with at most `concurrency` requests at once.
    """

    def __init__(self, options: RemoteOptions | None = None) -> None:
        super().__init__(options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient
        self._places: asyncio.Semaphore

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if not self.options.url:
            raise ValueError('reward remote has no url; write url = "https://..." in its [[rewards]] table')
        if trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated:
            return Score(0.0)
        self._connect()
        return read_score(await self._posted(request_body(task, trajectory)))

    def _connect(self) -> None:
        """Create the client if this event loop has none; connections belong to the event loop that opened them."""
        import httpx

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            headers = {
                name: value.reveal() if isinstance(value, Secret) else value
                for name, value in self.options.headers.items()
            }
            limits = httpx.Limits(max_connections=self.options.concurrency)
            headers["Content-Type"] = "application/json"
            self._client = httpx.AsyncClient(headers=headers, timeout=self.options.request_timeout_s, limits=limits)
            self._places, self._loop = asyncio.Semaphore(self.options.concurrency), loop

    async def _posted(self, body: bytes) -> str:
        """Post the sample, with retries, and return the body of the answer that has status 200.

        Raises ValueError for a status that is not retried, and InfrastructureError for a timeout or after the last
        attempt.
        """
        import httpx

        attempts = self.options.retries + 1
        problem = ""
        for attempt in range(attempts):
            if attempt:
                pause = min(self.options.backoff_s * 2 ** (attempt - 1), LONGEST_BACKOFF_S)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # spreads the retries of a batch over time
            try:
                async with self._places:  # released during a pause
                    answer = await self._client.post(self.options.url, content=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                within = f"request_timeout_s = {self.options.request_timeout_s:g}"
                raise InfrastructureError(f"the reward service did not answer within {within}") from error
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if answer.status_code == 200:
                return answer.text
            problem = f"HTTP {answer.status_code}: {answer.text[:200]!r}"
            if answer.status_code != 429 and answer.status_code < 500:
                raise ValueError(f"the reward service answered {problem}; it must answer 200 with a score")
        raise InfrastructureError(f"the reward service gave no score in {attempts} attempts, at last {problem}")


def request_body(task: Task, trajectory: Trajectory) -> bytes:
    """Return a sample as JSON: its task, the conversation and the response.

    Raises ValueError naming the task if the sample can't be written as JSON.
    """
    messages = [_plain(message) for message in trajectory.messages]
    prompt = task.prompt if isinstance(task.prompt, str) else [_plain(message) for message in task.prompt]
    body = {
        "task_id": task.id,
        "prompt": prompt,
        "messages": messages,
        "response": trajectory.response,
        "answer": task.answer,
        "metadata": dict(task.metadata),
        "truncated": trajectory.outcome is Outcome.TRUNCATED,
    }
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"task {task.id} can't be written as JSON: {error}; correct its row") from None


def read_score(text: str) -> Score:
    """Parse the score in a service's answer. Raises ValueError quoting the answer if it contains no valid score."""
    try:
        answer = json.loads(text)
        found = answer if isinstance(answer, dict) else {"score": answer}
        parts = found.get("parts", {})
        unknown = set(found) - {"score", "parts"}
        if "score" not in found or unknown or not isinstance(parts, dict):
            raise ValueError(f"its keys are {', '.join(sorted(map(str, found)))}")
        return Score(_finite(found["score"]), {name: _finite(part) for name, part in parts.items()})
    except (ValueError, OverflowError, RecursionError) as error:
        wanted = '{"score": number, "parts": {name: number}} or a number'
        raise ValueError(f"the reward service answered {text[:200]!r}, which is not {wanted}: {error}") from None


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON data; a medium is written as its reference."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [
            {"type": part.media.kind, "source": part.media.reference}
            if part.media
            else {"type": "text", "text": part.text}
            for part in content
        ]
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        plain["tool_calls"] = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return plain


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST_REWARD:
        raise ValueError(f"{value!r} is not a finite number from -1e9 to 1e9")
    return float(value)
