# SPDX-License-Identifier: Apache-2.0
"""Messages to people, through apprise: a run finished or failed, a role failed for good.

An observer like any plugin's: it runs in an outlet's thread, and a message that can't be sent is only logged.
The URLs are secrets; they are resolved before, and appear in no file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.api.errors import InfrastructureError
from relax_core.api.events import RoleFailed, RunFinished


class Notifier:
    """Sends to every URL of `[notify] urls`."""

    def __init__(self, urls: Sequence[str], run_name: str) -> None:
        self._urls, self._run_name = tuple(urls), run_name

    def relax_run_finished(self, event: RunFinished) -> None:
        self._send(f"{self._run_name} {event.status}", summary_line(event.summary))

    def relax_role_failed(self, event: RoleFailed) -> None:
        word = "failed" if event.fatal else "is being replaced"
        self._send(f"{self._run_name}: {event.role} {word}", event.error)

    def _send(self, title: str, body: str) -> None:
        import apprise

        # Its own log quotes URLs, which are secrets here; what failed is said below, without them.
        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
        target = apprise.Apprise()
        accepted = sum(bool(target.add(url)) for url in self._urls)
        if accepted < len(self._urls):
            raise InfrastructureError(
                f"notify.urls: {len(self._urls) - accepted} of {len(self._urls)} are not understood"
            )
        if not target.notify(title=title, body=body):
            raise InfrastructureError(f"notify.urls: {title!r} was not delivered to every URL")


def summary_line(summary: Mapping[str, Any]) -> str:
    """A run in one line."""
    parts = [f"{summary.get('steps', 0)} steps", f"{float(summary.get('wall_seconds') or 0):.0f} s"]
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        parts.append(f"reward {first:.3f} to {last:.3f}")
    if summary.get("error"):
        parts.append(str(summary["error"]))
    return ", ".join(parts)
