# SPDX-License-Identifier: Apache-2.0
"""In which form a run's weights reach its engines where adapters are trained: alone, or folded into whole versions.

An adapter alone is a thousandth of the model, but engine and transport must take it and it must be pairs of matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from relax_core.api.engine import Engine
from relax_core.api.weights import WeightTransport
from relax_core.options.run_config import RunConfig
from relax_core.plugins.catalogue import Catalogue


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
