# SPDX-License-Identifier: Apache-2.0
"""Options of the transformers engine. Imports pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relax_core.api.options import Options


class TransformersOptions(Options):
    """`[engine] name = "transformers"`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto` takes a GPU where torch sees one."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    max_batch_rows: int = Field(default=256, ge=1)
    """Requests that decode together."""
    max_batch_tokens: int = Field(default=65536, ge=1)
    """KV slots promised at once: the sum of prompt + max_new_tokens of running requests. One request always runs."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Tokens of one prefill pass; bounds its activation memory."""
    deltas_every: int = Field(default=16, ge=1)
    """Iterations between two deltas of a running request; finished ones are sent within four."""
