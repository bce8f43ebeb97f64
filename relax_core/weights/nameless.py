# SPDX-License-Identifier: Apache-2.0
"""Files without a name, for what a sender keeps of its last version: memory that the system can write back, and that ends
with the process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from relax_core.api.errors import InfrastructureError


def nameless(directory: str) -> IO[bytes]:
    """In this directory, or where temporary files go."""
    try:
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(prefix="relax-weights-", dir=directory or None)
    except OSError as error:
        where = directory or "the temporary directory"
        raise InfrastructureError(f"weights: can't keep a delta's base in {where}: {error.strerror}") from error
