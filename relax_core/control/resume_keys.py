# SPDX-License-Identifier: Apache-2.0
"""The keys of a run that a resume may change. The command line shows them without importing the rest of `control`."""

MAY_CHANGE = (
    "checkpoint", "data.media", "eval", "export", "guards", "notify", "placement", "profile", "recovery", "run", "sinks",
    "steps",
)  # fmt: skip
"""Tables and keys that may change on resume; any other change would make the run another experiment."""
NEW_RUN = "for any other change start a new run with model.path=RUN/export, which a finished run has written"
"""The way to go on with another value of a key that may not change."""


def may_change(key: str) -> bool:
    """Return True if a resume may change a key."""
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in MAY_CHANGE)
