# SPDX-License-Identifier: Apache-2.0
"""Options of the transformers engine; this module does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relax_core.api.options import Options


class TransformersOptions(Options):
    """Options of `[engine] name = "transformers"`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto` is a GPU if torch sees one, else the CPU."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation, by its name in transformers. `auto` is `sdpa`, or `eager` if the architecture has no
    other, as Gemma 2 and gpt-oss."""
    max_batch_rows: int = Field(default=256, ge=1)
    """Maximum number of requests that decode together."""
    max_batch_tokens: int = Field(default=65536, ge=1)
    """Maximum sum of prompt tokens + `max_new_tokens` of running requests. An idle engine accepts any request."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Maximum number of tokens in one prefill pass, which bounds its activation memory."""
    deltas_every: int = Field(default=16, ge=1)
    """Iterations between two deltas of a running request. A finished request sends its delta within four iterations."""
