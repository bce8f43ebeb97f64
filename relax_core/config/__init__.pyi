# SPDX-License-Identifier: Apache-2.0
"""The names that this package exports, and the module of each; they load on first use."""

from .compose import Composed as Composed, compose as compose, parse_config as parse_config
from .problems import ConfigProblems as ConfigProblems
from .run_config import RunConfig as RunConfig, to_toml as to_toml
