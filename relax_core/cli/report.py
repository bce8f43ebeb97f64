# SPDX-License-Identifier: Apache-2.0
"""`relax report RUN`: write report.html and reward.png again, also for a run that still goes."""

from __future__ import annotations

import typer

from relax_core.cli.runs import RUN


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("report", help="Write a run's report again and print its path.")(report)


def report(run: RUN = None) -> None:
    """Write one run's report."""
    from relax_core.observe.run_directory import find_run
    from relax_core.views.report import write_report

    typer.echo(str(write_report(find_run(run))))
