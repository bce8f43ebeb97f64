# SPDX-License-Identifier: Apache-2.0
"""The names of the room, and the module of each."""

from .config.compose import Composed as Composed, compose as compose
from .control.dry_run import check_all as check_all
from .control.preflight import free_memory as free_memory
from .control.prepare import (
    Prepared as Prepared,
    plan_run as plan_run,
    prepare as prepare,
    recipe_layers as recipe_layers,
)
from .registry.catalogue import Catalogue as Catalogue, known_kind as known_kind
from .registry.description import (
    describe as describe,
    describe_command as describe_command,
    heavy_imports as heavy_imports,
    selected as selected,
)
from .registry.handshake import (
    PluginState as PluginState,
    Record as Record,
    api_range as api_range,
    core_range as core_range,
)
