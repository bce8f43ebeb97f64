# SPDX-License-Identifier: Apache-2.0
"""Access to engine pools from the isolated processes of rewards and environments.

The child's client sends each request as a call to the parent process, whose handler asks the pool. This module imports
no pool code, so that the child process stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.api.engine import Generated, ModelClient, Prompt
from relax_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError, RelaxError
from relax_core.rpc.isolated_host import ParentChannel
from relax_core.rpc.isolated_pool import Handler

CALL = "model"
"""Name of the parent's handler for model calls."""
METHODS = ("generate", "score")


class ModelRpcClient:
    """An `api.ModelClient` in the process of a reward or environment."""

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
    """Return the parent's handlers for model calls of one isolated process.

    `models`: the run's clients by pool name. `who`: the caller's name for error texts. `needs`: the pools that the
    process may call. Raises ConfigError if a needed pool does not exist.
    """
    if lacking := [name for name in needs if name not in models]:
        fix = "name a configuration that declares the pool in [[engines]]: relax try reward NAME FILE --data ROWS"
        raise ConfigError("engines", f"no pool named {', '.join(lacking)}, which {who} needs", fix)

    async def ask(pool: str, method: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if pool not in needs or method not in METHODS:
            raise ValueError(
                f"engine pool {pool}: cannot call {method}; list the pool in needs_engines, and call generate or score"
            )
        try:
            return await getattr(models[pool], method)(*args, **named)
        except (TypeError, ConfigError) as error:
            raise ValueError(str(error)) from error
        except DeadlineExceeded:
            raise
        except RelaxError as error:  # the author of the reward or environment cannot fix this
            raise InfrastructureError(str(error)) from error

    return {CALL: ask} if needs else {}
