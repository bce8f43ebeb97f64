# SPDX-License-Identifier: Apache-2.0
"""Checks of features that trainer, engine and transport must share: published adapters, routing replay, number formats.

Adapters are published alone or folded into whole versions. An adapter alone is a thousandth of the model, but engine
and transport must take it and it must be pairs of matrices.

A combination that can't work is refused before anything starts. What a device lacks (a GPU without bfloat16) is known
only where the device is: its trainer or engine refuses it at its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

from relax_core.api.algorithm import Source
from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.api.plan import Operation
from relax_core.api.routing import ROUTES
from relax_core.api.trainer import Trainer
from relax_core.api.weights import WeightTransport
from relax_core.config.model_folder import routing
from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue


def adapters_alone(config: RunConfig, catalogue: Catalogue, roles: Iterable[str]) -> tuple[bool, tuple[str, ...]]:
    """Whether adapters are published alone, and what the plan says of it."""
    if config.model.lora is None or "rollout" not in roles:
        return False, ()
    if why := _why_folded(config, catalogue):
        return False, (f"adapters are folded into the weights for every publish ({config.weights.payload}): {why}",)
    return True, ("adapters are published alone; engines lay them over the model that they started with",)


def _why_folded(config: RunConfig, catalogue: Catalogue) -> str:
    lora, engine, transport = config.model.lora, config.engine.name, config.weights.name
    capabilities = cast(type[Engine], catalogue.target("engine", engine)).capabilities
    payloads = cast(type[WeightTransport], catalogue.target("weight-transport", transport)).payloads
    reasons = {
        "model.lora.dora scales whole rows of a weight": lora is not None and lora.dora,
        "model.lora.modules_to_save are trained whole": lora is not None and bool(lora.modules_to_save),
        f"engine {engine} takes no adapters": not capabilities.lora,
        f"transport {transport} moves no adapters": "lora" not in payloads,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


FIELD = "model.routing_replay"


def replayed_columns(config: RunConfig, catalogue: Catalogue, source: Source) -> tuple[str, ...]:
    """Return the columns that the actor reads for routing replay; none where it routes for itself. Raises
    ConfigError."""
    replay = config.model.routing_replay
    if replay == "off":
        return ()
    _check_trainer(config, catalogue)
    if (config.model.path / "config.json").is_file() and routing(config.model.path) is None:
        raise ConfigError(FIELD, replay, f"{config.model.path} has no experts to route to: leave it out")
    if replay == "recompute":
        if config.batch.updates_per_step == 1:
            fix = "routes of one update are those of the step's start: leave it out, or raise batch.updates_per_step"
            raise ConfigError(FIELD, replay, fix)
        return ()
    if source is not Source.ROLLOUT:
        raise ConfigError(
            FIELD, replay, "rows of a dataset were not sampled here, so nobody knows their routes: leave it out"
        )
    _check_engine(config, catalogue)
    return ROUTES


def _check_trainer(config: RunConfig, catalogue: Catalogue) -> None:
    name = config.trainer.chosen.name
    trainer = cast(type[Trainer], catalogue.target("trainer", name))
    if not trainer.replays_routes:
        raise ConfigError(
            FIELD, config.model.routing_replay, f"trainer {name} replays no routes: use torch, or leave it out"
        )


def _check_engine(config: RunConfig, catalogue: Catalogue) -> None:
    name = config.engine.chosen.name
    engine = cast(type[Engine], catalogue.target("engine", name))
    if not engine.capabilities.routed_experts:
        able = [
            other for other in catalogue.names("engine")
            if cast(type[Engine], catalogue.target("engine", other)).capabilities.routed_experts
        ]  # fmt: skip
        use = " or ".join(able) or "another"
        fix = f"engine {name} does not tell which experts its tokens visited: use {use}, or leave it out"
        raise ConfigError(FIELD, config.model.routing_replay, fix)


ENGINE_FIELD = "rollout.dtype"
EXACT = "float32"
RECOMPUTED = "actor_fwd.log_probs"


def check_formats(
    config: RunConfig, catalogue: Catalogue, operations: Iterable[Operation], rounds: bool
) -> tuple[str, ...]:
    """Check the number formats and return the plan's notes on them. With `rounds`, an actor-fwd has own workers, which
    get whole weights as engines do."""
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
