# SPDX-License-Identifier: Apache-2.0
"""Plugins, found by package metadata, loaded one at a time, and looked up by kind and name; start at `catalogue.py`."""

from relax_core.registry.catalogue import Catalogue, Found
from relax_core.registry.error_text import plugin_frames
from relax_core.registry.handshake import PluginState, Record, ResolvedPlugin

__all__ = ["Catalogue", "Found", "Record", "ResolvedPlugin", "PluginState", "plugin_frames"]
