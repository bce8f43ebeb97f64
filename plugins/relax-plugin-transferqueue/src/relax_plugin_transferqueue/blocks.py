# SPDX-License-Identifier: Apache-2.0
"""A block of ragged columns as one TransferQueue sample: a field of bytes per column, and a tag that describes them.

The TransferQueue package returns each tensor as a row of a nested tensor. Bytes are returned unchanged, and the tag
holds their dtype and shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
from tensordict import TensorDict
from torch import Tensor, from_numpy

from relax_core.api.batch import Ragged

Tag = Mapping[str, list[Any]]
"""Description of columns: dtype, shape and row lengths, by column name."""


def packed(columns: Mapping[str, Ragged]) -> tuple[TensorDict, dict[str, Any]]:
    """Return columns as the fields of one sample, and the sample's tag. Empty columns have no field."""
    tag: dict[str, list[Any]] = {}
    fields: dict[str, Tensor] = {}
    for name, column in columns.items():
        values, lengths = column.values, np.asarray(column.lengths, np.int64)
        raw = (
            np.frombuffer(msgpack.packb(values.tolist()), np.uint8)
            if values.dtype.hasobject
            else np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        )
        tag[name] = [values.dtype.str, list(values.shape), lengths.tobytes()]
        if raw.size:
            fields[name] = from_numpy(raw if raw.flags.writeable else raw.copy()).unsqueeze(0)
    return TensorDict(fields, batch_size=1), {"columns": tag}


def unpacked(described: list[Any], raw: Tensor | None) -> Ragged:
    """Build a column from its description in the tag and its bytes; `raw` is None for an empty column."""
    dtype, shape, lengths = np.dtype(described[0]), tuple(described[1]), np.frombuffer(described[2], np.int64)
    found = np.zeros(0, np.uint8) if raw is None else raw.numpy()
    if dtype.hasobject:
        values = np.empty(shape, dtype)
        values[...] = msgpack.unpackb(found.tobytes()) if raw is not None else []
        return Ragged(values, lengths)
    return Ragged(found.view(dtype).reshape(shape), lengths)
