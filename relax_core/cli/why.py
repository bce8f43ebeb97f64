# SPDX-License-Identifier: Apache-2.0
"""`relax why RUN`: who waits for what, who owes it, since when and until when."""

from __future__ import annotations

import time
from dataclasses import asdict

import typer

from relax_core.cli.runs import JSON, RUN, print_json


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("why", help="Say who waits for what, and who owes it.")(explain)


def explain(run: RUN = None, json: JSON = False) -> None:
    """Explain one run's waits."""
    from relax_core.views.report import warning
    from relax_core.views.run import health, open_run
    from relax_core.views.why import why

    view, wall = open_run(run), time.time()
    answer, odd = why(view.status(), health(view, wall), wall), warning(view)
    if json:
        told = {"culprit": answer.culprit, **asdict(answer), "warning": odd}
        print_json({"schema": "relax.why/1", "run": view.name, **told})
        return
    for line in (*answer.lines(), *([odd] if odd else [])):
        typer.echo(line)
