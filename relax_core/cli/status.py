# SPDX-License-Identifier: Apache-2.0
"""`relax status RUN`: how far it is, what it earned, what each role does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from relax_core.cli.runs import JSON, RUN, print_json, print_table


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("status", help="Show a run's progress and its live roles.")(status)


def status(run: RUN = None, json: JSON = False) -> None:
    """Show one run."""
    from relax_core.views.run import health, listed, open_run

    view, wall = open_run(run), time.time()
    line, state, said = listed(view, wall), health(view, wall), view.status()
    if json:
        body = asdict(line) | {"said_s_ago": state.said_s_ago, "detail": state.detail, "roles": said.get("roles", [])}
        print_json({"schema": "relax.run-status/1", **body})
        return
    steps = f"{line.step}/{line.steps}" if line.steps else str(line.step)
    typer.echo(f"{line.name}: {state.state}, step {steps}{f'; {state.detail}' if state.detail else ''}")
    if line.reward_first is not None and line.reward_last is not None:
        typer.echo(f"reward {line.reward_first:.3f} -> {line.reward_last:.3f} (means of 10 steps)")
    if said.get("roles") and not state.ended:
        print_table(("role", "state", "doing"), [_row(role) for role in said["roles"]])


def _row(role: Mapping[str, Any]) -> tuple[str, ...]:
    waits = ", ".join(f"for {wait['reason']} from {wait['owed_by']}" for wait in role.get("waits", ()))
    if waits and role["state"] != "waiting":  # one of its loops does, others work
        waits = f"waits {waits}"
    return role["role"], role["state"], waits or role.get("doing", "")
