# SPDX-License-Identifier: Apache-2.0
"""Options of the components in the box: their names from the schema, and components as a configuration builds them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from relax_core.api.component import BY_TABLE, KINDS, Configurable
from relax_core.config.compose import compose
from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue

CATALOGUE = Catalogue.load()
MINIMAL = {"model": {"path": "model"}, "data": {"train": "tasks.jsonl"}, "algorithm": "grpo", "rewards": ["exact"]}


@cache
def options(kind: str) -> tuple[tuple[str, str], ...]:
    """Return (component, option) for every option of every component of a kind."""
    return tuple(
        (name, option)
        for name in CATALOGUE.names(kind)
        for option in CATALOGUE.target(kind, name).options_model().model_fields
    )


def configured(kind: str, name: str, given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run whose file chooses this component with these options."""
    known, chosen = KINDS[kind], {"name": name, **given}
    return compose([MINIMAL, {known.table: [chosen] if known.many else chosen}], (), CATALOGUE, on_disk=False).config


def built(kind: str, name: str, given: Mapping[str, Any]) -> Any:
    """Return the component that a role builds for this table of the configuration."""
    config, table = configured(kind, name, given), KINDS[kind].table
    if kind == "algorithm":
        return CATALOGUE.build(config.learner)  # as actor and advantages do
    choice = getattr(config, table)[0] if BY_TABLE[table].many else getattr(config, table)
    made: Configurable = CATALOGUE.build(choice.chosen)
    return made
