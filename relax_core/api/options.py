# SPDX-License-Identifier: Apache-2.0
"""`Options`: the frozen pydantic model that every component's options derive from.

The only module of `api` that imports pydantic; `relax_core.api.Options` loads it on first use.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Typed, frozen, keyword-only; unknown keys are errors; a string under a field is its documentation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        ser_json_inf_nan="constants",  # TOML has inf: an option set to it must not come back as nothing
    )
