# SPDX-License-Identifier: Apache-2.0
"""The hook that writes the report at a run's end."""

from __future__ import annotations

from relax_core.api import events
from relax_core.api.hooks import hook


@hook
def relax_run_closed(event: events.RunClosed) -> None:
    """Write the report; if that fails, for example on a full disk, print a warning only."""
    from relax_core.api.errors import RelaxError
    from relax_core.cli.terminal import say
    from relax_plugin_report.report import write_report

    path = event.run_dir
    try:
        write_report(path)
    except (OSError, RelaxError) as error:
        say(f"relax: no report written: {error}; write it later with `relax report {path}`", err=True)
