# SPDX-License-Identifier: Apache-2.0
"""The verb `relax scale`: change the number of engines of a live run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.runs import REQUEST_POLL_S, Address, TokenFile, remote
from relax_core.cli.terminal import AsJson, print_json, say

if TYPE_CHECKING:
    from relax_core.control_api.client import ControlClient
    from relax_core.engines.scaling import ScaleRequest
    from relax_core.views.run import RunView


def scale(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN] [POOL=N]", help="The run, and a pool with the number of engines it is to have."),
    ] = None,
    drain: Annotated[str, typer.Option(metavar="ENGINE", help="Let this engine leave; relax engines lists them.")] = "",
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
    """Change the number of engines of a live run: `relax scale quickstart rollout=4`.

    The pool of the policy's engines is called rollout; other pools have the names of their tables in [[engines]]. An
    engine that joins serves once it has proved the newest weights. The requests of an engine that leaves continue on
    other engines from their last token; the newest engines leave first.
    """
    from relax_core.api.errors import ConfigError, InfrastructureError
    from relax_core.engines.scaling import GOOD
    from relax_core.views.answers import scale_plan, scaling_of, try_scaling
    from relax_core.views.run import health, open_run, readable_documents

    run, request = _request(arguments or [], drain, cancel, keep_partial)
    if address:
        _scale_remotely(remote(address, token_file, run), request, dry_run, wait_s if wait else None, json)
        return
    view = open_run(run)
    found = _pool_of(view, request)
    with readable_documents(view):
        state, pools = health(view, time.time()), scaling_of(view)
    if state.ended or state.state == "lost":
        raise ConfigError("run", f"{view.name}, which is {state.state}", "only a live run can be scaled")
    operation, actions = try_scaling(pools, found, time.time())
    if dry_run:
        _show_plan(scale_plan(view.name, operation, actions), json)
        return
    deadline, asked = time.monotonic() + wait_s, -1
    while True:
        status = view.status()
        known = scaling_of(view).get(found.pool)
        done = None if known is None else known.operations.get(found.cancel) or known.find(found.key)
        if done is not None and asked >= 0 and (not done.open or not (wait or found.cancel)):
            break
        state = health(view, time.time())
        if state.ended or state.state == "lost":
            raise InfrastructureError(f"{view.name}: the run is {state.state}; nothing more is scaled")
        if asked != (pid := int(status.get("pid", 0))):
            view.request_scale(asdict(found))  # repeated for a new process of the run; the key tells the repetition
            asked = pid
        if time.monotonic() > deadline:
            later = f"it goes on; `relax engines {view.name}` shows how far it is" if done else "no process took it up"
            raise InfrastructureError(f"{view.name}: not scaled within {wait_s:.0f} s; {later}")
        time.sleep(REQUEST_POLL_S)
    if json:
        print_json({"schema": "relax.scale/1", "run": view.name, **asdict(done)})
    else:
        say(f"{view.name}: {_told(asdict(done))}")
    if not done.open and done.state not in (("cancelled",) if found.cancel else GOOD):
        raise InfrastructureError(f"{view.name}: {done.id} is {done.state}: {done.detail}")


def _request(arguments: Sequence[str], drain: str, cancel: str, keep_partial: bool) -> tuple[str | None, ScaleRequest]:
    """Return the run's name and the request of a command line. Raises ConfigError."""
    from relax_core.api.errors import ConfigError
    from relax_core.engines.scaling import ScaleRequest

    targets = [one for one in arguments if "=" in one]
    runs = [one for one in arguments if "=" not in one]
    given = len(targets) + bool(drain) + bool(cancel)
    if len(runs) > 1 or given != 1:
        fix = "give one run, and one of POOL=N, --drain ENGINE and --cancel OPERATION"
        raise ConfigError("arguments", " ".join(arguments) or "nothing", fix)
    pool, _, number = targets[0].partition("=") if targets else ("", "", "")
    if targets and not number.isdecimal():
        raise ConfigError(pool, number or "nothing", "give the number of engines that the pool is to have")
    target = int(number) if targets else None
    return (runs[0] if runs else None), ScaleRequest(uuid.uuid4().hex, pool, target, drain, cancel, keep_partial)


def _scale_remotely(
    client: ControlClient, request: ScaleRequest, dry_run: bool, wait_s: float | None, json: bool
) -> None:
    path, fields = "/engines", {"pool": request.pool, "target": request.target, "keep_partial": request.keep_partial}
    if request.engine or request.cancel:
        path = f"/engines/{request.engine}/drain" if request.engine else f"/operations/{request.cancel}/cancel"
        fields = {}
    if dry_run:
        _show_plan(client.ask(path, {**fields, "dry_run": True}), json)
        return
    operation = client.ask(path, fields) if wait_s is None else client.change("scale", wait_s, path, fields)
    if json:
        print_json(operation)
    else:
        say(f"scale: {operation['state']}" + (f"; {operation['detail']}" if operation["detail"] else ""))


def _pool_of(view: RunView, request: ScaleRequest) -> ScaleRequest:
    """Find the pool of an engine or operation that the request names."""
    from dataclasses import replace

    from relax_core.views.answers import scaling_of

    if request.pool:
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
        say(f"{plan['run']}: nothing would change: {plan['operation']['detail']}")


def _told(operation: Mapping[str, Any]) -> str:
    said = f"{operation['id']}: {operation['state']}, {operation['before']} -> {operation['target']} engines"
    return f"{said}; {operation['detail']}" if operation["detail"] else said
