# SPDX-License-Identifier: Apache-2.0
"""Profiles of the computing of a trainer's rank or of an engine, as files for Perfetto and a table for people."""

from __future__ import annotations

import os
from pathlib import Path

import torch

OPERATIONS = 40
"""Rows of the table of operations."""


class StepProfile:
    """A torch profile of one thread from its creation to `write`: operations on CPU and GPU, with their memory."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(profile_memory=True, record_shapes=True)
        self._profiler.start()

    def write(self, path: str, max_bytes: int) -> int:
        """End the profile; write `PATH.trace.json.gz` and `PATH.operations.txt`, and return the size of the trace.

        A trace of more than `max_bytes` is deleted, so that a long step does not fill the disk.
        """
        self._profiler.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        busiest = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._profiler.key_averages().table(sort_by=busiest, row_limit=OPERATIONS, max_name_column_width=60)
        Path(f"{path}.operations.txt").write_text(f"{table}\n", encoding="utf-8")
        trace, unfinished = Path(f"{path}.trace.json.gz"), Path(f"{path}.tmp.json.gz")
        self._profiler.export_chrome_trace(str(unfinished))
        size = unfinished.stat().st_size
        if size > max_bytes:
            unfinished.unlink()
            trace.unlink(missing_ok=True)
        else:
            os.replace(unfinished, trace)
        return size

    def discard(self) -> None:
        self._profiler.stop()
