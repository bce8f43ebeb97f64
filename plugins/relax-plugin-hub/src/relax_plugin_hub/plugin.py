# SPDX-License-Identifier: Apache-2.0
"""Registration of the table `[hub]` and of its check, and the hooks that pass a run's exports to its uploads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from relax_core.api import events
from relax_core.api.component import Check, Table
from relax_core.api.hooks import hook

if TYPE_CHECKING:
    from relax_plugin_hub.uploads import Uploads

HERE = "relax_plugin_hub"


class _OfTheRun(threading.local):
    """Data of one run: one thread makes all calls about a run."""

    uploads: Uploads | None = None


_run = _OfTheRun()


@hook
def relax_tables() -> list[Table]:
    return [Table("hub", f"{HERE}.table:HubTable", "upload of exports to the Hugging Face Hub")]


@hook
def relax_checks() -> list[Check]:
    help_line = "this machine has a token for the model of [hub]"
    return [Check("account", f"{HERE}.hub:account", help_line, stage="preflight")]


@hook
def relax_run_opened(event: events.RunOpened) -> events.WorkAtEnd | None:
    _run.uploads = None
    if not event.config.get("hub", {}).get("push_to"):
        return None
    from relax_plugin_hub.uploads import Uploads

    _run.uploads = Uploads.of(event)
    return _run.uploads.work


@hook
def relax_export_saved(event: events.ExportSaved) -> None:
    if _run.uploads is not None:
        _run.uploads.saved(event)


@hook
def relax_run_finished(event: events.RunFinished) -> None:
    if _run.uploads is not None:
        _run.uploads.finish(with_final=event.status == "finished")


@hook
def relax_run_closed() -> None:
    if _run.uploads is not None:
        _run.uploads.close()
