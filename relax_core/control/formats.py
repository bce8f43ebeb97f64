# SPDX-License-Identifier: Apache-2.0
"""Whether a run's number formats fit those that compute in them; what can't be is refused before anything starts.

What a device lacks (a GPU without bfloat16) is known where the device is: its trainer or engine refuses it at its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.api.role import Operation
from relax_core.api.trainer import Trainer
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue

ENGINE_FIELD = "rollout.dtype"
EXACT = "float32"
RECOMPUTED = "actor_fwd.log_probs"


def check_formats(
    config: RunConfig, catalogue: Catalogue, operations: Iterable[Operation], rounds: bool
) -> tuple[str, ...]:
    """What the plan says of them. `rounds`: an actor-fwd has own workers, which get whole weights as engines do."""
    names = {operation.name for operation in operations}
    trainer, engine = config.trainer.chosen.name, config.engine.chosen.name
    own, theirs = config.model.dtype, config.engine_dtype
    _check("model.dtype", own, trainer, cast(type[Trainer], catalogue.target("trainer", trainer)).dtypes)
    if not any(name.startswith("rollout.") for name in names):
        return ()
    able = cast(type[Engine], catalogue.target("engine", engine)).capabilities.dtypes
    _check(ENGINE_FIELD if config.rollout.dtype else "model.dtype", theirs, engine, able)
    if rounds and RECOMPUTED in names and theirs not in (own, EXACT):
        raise ConfigError(
            ENGINE_FIELD, theirs,
            f"actor-fwd has devices of its own and gets the weights as engines do, rounded, while the actor computes in {own}: "
            f"set it to {own} or {EXACT}, or keep actor-fwd on the actor's workers (placement.mode)",
        )  # fmt: skip
    return (
        () if own == theirs else (f"trainers compute in {own}, engines in {theirs}: weights are published in {theirs}",)
    )


def _check(field: str, dtype: str, name: str, able: Collection[str]) -> None:
    if dtype not in able:
        raise ConfigError(field, dtype, f"{name} computes in {', '.join(able)}")
