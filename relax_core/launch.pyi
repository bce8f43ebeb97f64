# SPDX-License-Identifier: Apache-2.0
"""The names of the room, and the module of each."""

from .config.compose import Composed as Composed, compose as compose
from .config.run_config import (
    DEFAULT_NAMES as DEFAULT_NAMES,
    DEFAULT_SANDBOX as DEFAULT_SANDBOX,
    Choice as Choice,
    Core as Core,
    MediaChoice as MediaChoice,
    RewardChoice as RewardChoice,
    RunConfig as RunConfig,
    RunContext as RunContext,
    core_tables as core_tables,
    keys_model as keys_model,
    literal as literal,
    table_keys as table_keys,
    top_level_keys as top_level_keys,
)
from .control.dry_run import check_all as check_all
from .control.planner import plan as plan
from .control.preflight import first_step as first_step, free_memory as free_memory, preflight as preflight
from .control.prepare import (
    Prepared as Prepared,
    make_launch as make_launch,
    plan_run as plan_run,
    prepare as prepare,
    prepare_resume as prepare_resume,
    recipe_layers as recipe_layers,
)
from .control.run import run as run
from .control.stages import StageDirectory as StageDirectory, stage_directories as stage_directories
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
from .runners.launch import Launch as Launch
