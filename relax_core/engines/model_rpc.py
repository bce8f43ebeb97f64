# SPDX-License-Identifier: Apache-2.0
"""Engine pools for rewards and environments in processes of their own: their clients, and the parent's answers.

Requests travel as calls of an isolated process to its parent. Nothing of a pool is imported here: the process stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.api.engine import Generated, ModelClient, Prompt
from relax_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError, RelaxError
from relax_core.rpc.host import ParentChannel
from relax_core.rpc.isolated_pool import Handler

CALL = "model"
"""The parent's handler of model calls."""
METHODS = ("generate", "score")


class ModelRpcClient:
    """`api.ModelClient` in a process of rewards or environments."""

    def __init__(self, parent: ParentChannel, name: str) -> None:
        self._parent, self.name = parent, name

    async def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
        stop: tuple[str, ...] = (), timeout_s: float = 0.0,
    ) -> Generated:  # fmt: skip
        named = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop, "timeout_s": timeout_s}
        generated: Generated = await self._parent.call(CALL, self.name, "generate", (prompt, max_new_tokens), named)
        return generated

    async def score(
        self, prompt: Prompt, completions: Sequence[str | Sequence[int]], *, temperature: float = 1.0,
        timeout_s: float = 0.0,
    ) -> tuple[tuple[float, ...], ...]:  # fmt: skip
        named = {"temperature": temperature, "timeout_s": timeout_s}
        scores: tuple[tuple[float, ...], ...] = await self._parent.call(
            CALL, self.name, "score", (prompt, completions), named
        )
        return scores


def model_handlers(models: Mapping[str, ModelClient], who: str, needs: Sequence[str]) -> dict[str, Handler]:
    """Handlers for the model calls of a process that asks these pools. Raises ConfigError where one is not there."""
    if lacking := [name for name in needs if name not in models]:
        fix = "try it with a configuration whose [[engines]] have it: relax try FILE"
        raise ConfigError("engines", f"nothing named {', '.join(lacking)}, which {who} asks", fix)

    async def ask(pool: str, method: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if pool not in needs or method not in METHODS:
            raise ValueError(f"engine pool {pool}: {method} was not asked for before start (needs_engines)")
        try:
            return await getattr(models[pool], method)(*args, **named)
        except (TypeError, ConfigError) as error:
            raise ValueError(str(error)) from error
        except DeadlineExceeded:
            raise
        except RelaxError as error:  # nothing that the author of a reward could mend
            raise InfrastructureError(str(error)) from error

    return {CALL: ask} if needs else {}
