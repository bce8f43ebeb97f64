# SPDX-License-Identifier: Apache-2.0
"""The command `relax scale`: change the number of engines of a live run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from relax_core.api.errors import ConfigError
from relax_core.api.run_commands import ScaleRequest
from relax_core.cli.terminal import Address, AsJson, TokenFile, print_json, print_operation, remote, say
from relax_core.runs import RunControl, RunView, expected, open_run, scale_plan, scaling_of


def scale(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN] [POOL=N]", help="The run, and a pool with the number of engines it is to have."),
    ] = None,
    drain: Annotated[str, typer.Option(metavar="ENGINE", help="Let this engine leave; relax engines lists them.")] = "",
    drain_node: Annotated[
        str,
        typer.Option(metavar="NODE", help="Let all engines on this node leave, except the first ones of each pool."),
    ] = "",
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Let the engine join that `relax engine serve` serves there.")
    ] = "",
    cancel: Annotated[str, typer.Option(metavar="OPERATION", help="Cancel an open operation, and undo it.")] = "",
    keep_partial: Annotated[
        bool, typer.Option("--keep-partial", help="If an engine can't join, keep the engines that did.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show which engines would join or leave.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the operation has ended.")] = True,
    wait_s: Annotated[float, typer.Option(help="Most seconds to wait.", min=0.0)] = 3600.0,
    address: Address = "",
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Change the number of engines of a live run.

    `relax scale quickstart rollout=4` asks for four engines. The pool of the policy's engines is called rollout; other
    pools have the names of their tables in [[engines]]. An engine that joins serves once it has proved the newest weights.
    The requests of an engine that leaves continue on other engines from their last token; the newest engines leave first.
    """
    run, request = _request(arguments or [], drain, cancel, keep_partial, join, drain_node)
    if address:
        client = remote(address, token_file, run)
        if dry_run:
            _show_plan(client.ask(request, dry_run=True), json)
        else:
            print_operation(address, client.change(request, wait_s) if wait else client.ask(request), json)
        return
    view = open_run(run)
    control, request = RunControl(view), _pool_of(view, request)
    if dry_run:
        _show_plan(scale_plan(view.name, expected(request, control.facts(), time.time())), json)
        return
    operation = control.change(request, wait_s) if wait else asdict(control.ask(request, request.key)[0])
    print_operation(view.name, operation, json)


def _request(
    arguments: Sequence[str], drain: str, cancel: str, keep_partial: bool, join: str = "", node: str = ""
) -> tuple[str | None, ScaleRequest]:
    """Return the run's name and the request of a command line. Raises ConfigError."""
    targets = [one for one in arguments if "=" in one]
    runs = [one for one in arguments if "=" not in one]
    given = len(targets) + bool(drain) + bool(cancel) + bool(join) + bool(node)
    if len(runs) > 1 or given != 1:
        fix = "give one run, and one of POOL=N, --drain ENGINE, --drain-node NODE, --join HOST:PORT and --cancel OPERATION"
        raise ConfigError("arguments", " ".join(arguments) or "nothing", fix)
    pool, _, number = targets[0].partition("=") if targets else ("", "", "")
    if targets and not number.isdecimal():
        raise ConfigError(pool, number or "nothing", "give the number of engines that the pool is to have")
    target = int(number) if targets else None
    request = ScaleRequest(uuid.uuid4().hex, pool, target, drain, join, cancel, node, keep_partial=keep_partial)
    return (runs[0] if runs else None), request


def _pool_of(view: RunView, request: ScaleRequest) -> ScaleRequest:
    """Find the pool of an engine or operation that the request names. A node is drained in all pools."""
    if request.pool or request.node:
        return request
    pools = scaling_of(view)
    own = [name for name, one in pools.items() if request.engine in one.engines or request.cancel in one.operations]
    return replace(request, pool=own[0] if own else "rollout")


def _show_plan(plan: Mapping[str, Any], json: bool) -> None:
    if json:
        print_json(plan)
        return
    for one in plan["actions"]:
        say(f"{plan['run']}: {one['engine']} would {one['action'].replace('canceljoin', 'not join')}")
    if not plan["actions"]:
        say(f"{plan['run']}: nothing would change: {plan['operations'][0]['detail']}")
