# SPDX-License-Identifier: Apache-2.0
"""The names that this package exports, and the module of each; they load on first use."""

from .checks import holdout_errors as holdout_errors
from .compose import Composed as Composed, compose as compose, load as load, parse_config as parse_config
from .layers import plugin_files as plugin_files
from .problems import ConfigProblems as ConfigProblems
from .run_config import RunConfig as RunConfig
from .toml_text import to_toml as to_toml
