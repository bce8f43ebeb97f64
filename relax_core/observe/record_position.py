# SPDX-License-Identifier: Apache-2.0
"""The position up to which a run's events are recorded, in `.recorded.json`, so that another process can go on from there.

Before each event the recorder writes down how long the files are that the event may add to, and what it holds in memory
alone. A successor cuts the files back to that and records the event again, so that it is in them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.observe.documents import read_document, write_document

FILE, SCHEMA = ".recorded.json", "relax.recorded/1"


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """The record of one start of a run, as it was before an event."""

    run_id: str
    """Name of that start, which has event numbers of its own."""
    number: int
    """Event that was recorded last."""
    sizes: Mapping[str, int]
    """Bytes of the files that the next event may add to, by their path in the run directory."""
    accounted: int = 0
    """Last step whose time is written down."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Totals since the last step's line of metrics, which carries them."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Reports of steps that have not ended, by step."""
    generated: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)

    def write(self, run_dir: Path) -> None:
        """Replace the one before: worth nothing after a power cut, since no role survives that."""
        write_document(run_dir / FILE, SCHEMA, asdict(self), durable=False)

    @classmethod
    def read(cls, run_dir: Path) -> RecordPosition | None:
        """Read the position of a run; None where its recorder keeps none, or the file is not as it was written."""
        try:
            found = read_document(run_dir / FILE)
            return None if found is None else cls(**{key: found[key] for key in found if key != "schema"})
        except (ConfigError, TypeError):
            return None

    @staticmethod
    def forget(run_dir: Path) -> None:
        """Remove the position of an earlier start, with which nobody goes on."""
        (run_dir / FILE).unlink(missing_ok=True)
