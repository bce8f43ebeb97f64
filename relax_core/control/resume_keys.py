# SPDX-License-Identifier: Apache-2.0
"""The keys of a run that a resume may change. The command line shows them without importing the rest of `control`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.api.component import BY_TABLE, CORE_KEYS

if TYPE_CHECKING:
    from relax_core.registry.catalogue import Catalogue

MAY_CHANGE = (
    "checkpoint", "data.media", "eval", "export", "guards", "placement", "profile", "recovery", "run", "sinks",
    "steps",
)  # fmt: skip
"""Tables and keys that may change on resume; any other change would make the run another experiment."""
NEW_RUN = "for any other change start a new run with model.path=RUN/export, which a finished run has written"
"""The way to go on with another value of a key that may not change."""


def is_core_key(key: str) -> bool:
    """Return False for a key of a plugin's table."""
    table = key.partition(".")[0].partition("[")[0]
    return table in CORE_KEYS or table in BY_TABLE


def may_change(key: str, catalogue: Catalogue | None = None) -> bool:
    """Return True if a resume may change a key; keys of plugins' tables need the catalogue."""
    if not is_core_key(key):
        table, _, name = key.partition(".")
        known = catalogue is not None and table in catalogue.names("table")
        own = catalogue.table(table).may_change if catalogue and known else ()
        return "*" in own or name.partition(".")[0] in own
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in MAY_CHANGE)
