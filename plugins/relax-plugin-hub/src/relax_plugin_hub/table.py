# SPDX-License-Identifier: Apache-2.0
"""The configuration table `[hub]`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveFloat

from relax_core.api.options import TableOptions


class HubTable(TableOptions):
    """Upload of the run's exports and of its final model to the Hugging Face Hub, while the run trains."""

    may_change: ClassVar[tuple[str, ...]] = ("*",)
    of_the_run: ClassVar[bool] = True

    push_to: str = ""
    """Model of the Hugging Face Hub, USER/NAME, that receives each export and the final model. The account is that of
    `hf auth login` or HF_TOKEN. A missing model is created, private. Training does not wait for uploads; empty: no
    uploads."""
    timeout_s: PositiveFloat = 3600.0
    """Seconds until an upload is stopped. A finished run waits for the upload of its final model, and for an upload that
    started before, each at most this long."""
