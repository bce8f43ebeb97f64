# SPDX-License-Identifier: Apache-2.0
"""Whether routes can be replayed as `model.routing_replay` asks, and which columns that takes. Nothing here routes."""

from __future__ import annotations

from typing import cast

from relax_core.api.algorithm import Source
from relax_core.api.engine import Engine
from relax_core.api.errors import ConfigError
from relax_core.api.routing import ROUTES
from relax_core.api.trainer import Trainer
from relax_core.options.model_folder import routing
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue

FIELD = "model.routing_replay"


def replayed_columns(config: RunConfig, catalogue: Catalogue, source: Source) -> tuple[str, ...]:
    """What the actor reads beside its other columns: nothing where it routes for itself. Raises ConfigError."""
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
