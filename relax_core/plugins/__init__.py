# SPDX-License-Identifier: Apache-2.0
"""Plugins: found by metadata, loaded one at a time, looked up by kind and name. See `catalogue.py`."""

from relax_core.plugins.catalogue import Catalogue, Found
from relax_core.plugins.frames import plugin_frames
from relax_core.plugins.record import Record, State
from relax_core.plugins.resolved import ResolvedPlugin

__all__ = ["Catalogue", "Found", "Record", "ResolvedPlugin", "State", "plugin_frames"]
