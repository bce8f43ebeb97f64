# SPDX-License-Identifier: Apache-2.0
"""The environment of most tasks: one answer to one prompt, judged by rewards."""

from __future__ import annotations

from typing import ClassVar

from relax_core.api.environment import Action, Environment, Observation, Step
from relax_core.api.options import Options
from relax_core.api.task import Task

_DONE = Step("", done=True)


class SingleTurn(Environment[Options]):
    """One answer to one prompt."""

    in_process: ClassVar[bool] = True
    never_waits: ClassVar[bool] = True
    """Its calls need no deadline: thousands of them a step."""

    async def reset(self, task: Task, seed: int) -> Observation | None:
        return None

    async def step(self, action: Action) -> Step:
        return _DONE
