# SPDX-License-Identifier: Apache-2.0
"""An engine that asks a run to let it join: what it repeats, what ends it, and what it tells a person."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from relax_plugin_scaling.joining import join_until_left

from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.run_commands import Command, ScaleRequest
from relax_core.control_api.client import Answered
from tests.clocks import HandClock

REQUESTED = {"id": "1", "state": "requested", "detail": ""}
DONE = {"id": "1", "state": "done", "detail": "rollout-1 is active"}


class ScriptedApi:
    """A control API that gives the answers of a list, in order."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[str]()

    def _next(self) -> dict[str, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def ask(self, command: Command) -> dict[str, Any]:
        assert command == ScaleRequest(command.key, address="127.0.0.1:8701")
        self.asked.append("join")
        return self._next()

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/operations/1"
        self.asked.append("look")
        return self._next()


def refused(field: str) -> Answered:
    return Answered("http://run", field, "something", "do something else")


async def joined(api: ScriptedApi | None, *ends: str, patience_s: float = 60.0) -> list[str]:
    """Return what an engine says until the run lets it go."""
    said, queue = list[str](), asyncio.Queue[str]()
    for end in ends:
        queue.put_nowait(end)
    await join_until_left(api, "127.0.0.1:8701", queue, HandClock(), patience_s, said.append)
    return said


async def test_an_engine_asks_again_after_a_loss_until_the_run_lets_it_go() -> None:
    api = ScriptedApi(REQUESTED, REQUESTED, DONE, refused("engine"), refused("run"), DONE)
    said = await joined(api, "lost", "left")
    assert api.asked == ["join", "look", "look", "join", "join", "join"] and api.answers == []
    assert [line.partition(":")[0] for line in said] == [
        "this engine serves", "the connection to the run is lost", "not yet", "not yet", "this engine serves",
        "the run needs this engine no more",
    ]  # fmt: skip


async def test_without_a_control_api_the_engine_waits_for_the_run() -> None:
    assert await joined(None, "lost", "left") == [
        "the connection to the run is lost", "the run needs this engine no more",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ([refused("address")], ConfigError, "address: got something"),
        ([refused("authorization")], ConfigError, "authorization"),
        ([ConfigError("--address", "an address", "another")], ConfigError, "--address"),
        ([{**REQUESTED, "state": "failed", "detail": "no memory"}], InfrastructureError, "did not join: no memory"),
        ([refused("run")] * 14, InfrastructureError, "no run took this engine within 60 s: http://run: run: got"),
        ([InfrastructureError("no answer")] * 14, InfrastructureError, "within 60 s: no answer"),
    ],
)
async def test_an_engine_that_can_not_join_ends_with_the_reason(
    answers: list[Any], error: type[Exception], message: str
) -> None:
    api = ScriptedApi(*answers)
    with pytest.raises(error, match=message):
        await joined(api)
    assert len(api.answers) <= 1
