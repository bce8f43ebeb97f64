# SPDX-License-Identifier: Apache-2.0
"""The names that this package exports, and the module of each; they load on first use."""

from .catalogue import Catalogue as Catalogue, Found as Found
from .error_text import plugin_frames as plugin_frames
from .handshake import PluginState as PluginState, Record as Record, ResolvedPlugin as ResolvedPlugin
