# SPDX-License-Identifier: Apache-2.0
"""`relax doctor`: this machine, this installation and, where one is named, a configuration; a line each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[FILES...] [KEY=VALUE]...", help="A configuration to check too.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("doctor", help="Check the machine, the installation and a configuration.")(doctor)


def doctor(arguments: Arguments = None, as_json: AsJson = False) -> None:
    """Exit 0 where all is well, 2 for the installation or the configuration, 4 for the machine."""
    from relax_core.cli.runs import print_json
    from relax_core.cli.train import split
    from relax_core.control.machine import Finding
    from relax_core.diagnostics.doctor import findings

    found: list[Finding] = []
    for finding in findings(*split(arguments or [])):
        found.append(finding)
        if not as_json:
            typer.echo(finding.line)
    code = next((finding.exit_code for finding in found if finding.exit_code), 0)
    if as_json:
        rows = [{"ok": not finding.exit_code, **asdict(finding)} for finding in found]
        print_json({"schema": "relax.doctor/1", "ok": not code, "exit_code": code, "findings": rows})
    raise typer.Exit(code)
