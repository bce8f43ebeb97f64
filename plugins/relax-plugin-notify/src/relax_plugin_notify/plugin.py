# SPDX-License-Identifier: Apache-2.0
"""Registration of the table `[notify]` and of its check, and the hooks that pass a run's events to its notifier."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from relax_core.api import events
from relax_core.api.component import Check, Table
from relax_core.api.hooks import hook

if TYPE_CHECKING:
    from relax_plugin_notify.notifications import Notifier

HERE = "relax_plugin_notify"


class _OfTheRun(threading.local):
    """Data of one run: one thread makes all calls about a run."""

    notifier: Notifier | None = None


_run = _OfTheRun()


@hook
def relax_tables() -> list[Table]:
    return [Table("notify", f"{HERE}.table:NotifyTable", "messages to people about events of the run")]


@hook
def relax_checks() -> list[Check]:
    help_line = "Apprise understands each address of [notify]"
    return [Check("addresses", f"{HERE}.notifications:addresses", help_line, stage="preflight")]


@hook
def relax_run_opened(event: events.RunOpened) -> None:
    _run.notifier = None
    if event.config.get("notify", {}).get("urls"):
        from relax_plugin_notify.notifications import Notifier

        _run.notifier = Notifier.of(event)


@hook
def relax_run_started(event: events.RunStarted) -> None:
    _tell(event)


@hook
def relax_guard_fired(event: events.GuardFired) -> None:
    _tell(event)


@hook
def relax_role_failed(event: events.RoleFailed) -> None:
    _tell(event)


@hook
def relax_role_recovered(event: events.RoleRecovered) -> None:
    _tell(event)


@hook
def relax_rolled_back(event: events.RolledBack) -> None:
    _tell(event)


@hook
def relax_run_restarted(event: events.RunRestarted) -> None:
    _tell(event)


@hook
def relax_run_finished(event: events.RunFinished) -> None:
    _tell(event)


@hook
def relax_roles_reported(event: events.RolesReported) -> None:
    if _run.notifier is not None:
        _run.notifier.heartbeats(event.heartbeats, event.at)


@hook
def relax_run_closed() -> None:
    if _run.notifier is not None:
        _run.notifier.close()


def _tell(event: events.Event) -> None:
    if _run.notifier is not None:
        _run.notifier.event(event)
