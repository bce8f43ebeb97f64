# SPDX-License-Identifier: Apache-2.0
"""The names of the room, and the module of each."""

from .config.compose import Composed as Composed, compose as compose
from .control.prepare import Prepared as Prepared, plan_run as plan_run, prepare as prepare
from .registry.catalogue import Catalogue as Catalogue
from .runners.engine_host import EngineHost as EngineHost, host_engine as host_engine
