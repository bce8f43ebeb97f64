# SPDX-License-Identifier: Apache-2.0
"""The verb `relax logs`: the events of a run and the records of all its processes."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.runs import Run
from relax_core.cli.terminal import Interrupted, print_json, say

if TYPE_CHECKING:
    from relax_core.views.logs import LogFilter, RunLogs
    from relax_core.views.run import RunView


def logs(
    run: Run = None,
    role: Annotated[
        list[str] | None, typer.Option(metavar="ROLE", help="Only this role or process; may be repeated.")
    ] = None,
    level: Annotated[str, typer.Option(help="Lowest level: debug, info, warning, error or critical.")] = "debug",
    since: Annotated[str, typer.Option(help="Earliest record: an age such as 10m, 2h or 1d, or a time in UTC.")] = "",
    step: Annotated[int | None, typer.Option(help="Only records of this step.")] = None,
    last: Annotated[int | None, typer.Option(help="Only the last N of the records so far.", min=0)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show further records until the run ends.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print each record as one line of JSON.")] = False,
) -> None:
    """Show what a run logged: its events and the records of all its processes, in order of time.

    Records are the log lines of Relax, of plugins and of libraries, and the plain output of engines, trainers, rewards
    and environments. Works on live, ended, killed and damaged runs. With --json, stdout has one JSON document a line.
    """
    from relax_core.api.errors import ConfigError
    from relax_core.observe.process_log import LEVELS
    from relax_core.views.logs import LogFilter, RunLogs, follow as followed, parsed_since
    from relax_core.views.run import open_run

    if level not in LEVELS:
        raise ConfigError("--level", level, f"use one of {', '.join(LEVELS)}")
    view = open_run(run)
    found, wanted = RunLogs(view.path), LogFilter(role or (), level, parsed_since(since, time.time()), step)
    sources: set[str] = set()
    past = _chosen(found.added(), wanted, sources)
    try:
        _print(past if last is None else deque(past, last), json)
        if follow:
            _print(_chosen(followed(view, found), wanted, sources), json)
    except Interrupted:
        if not follow:
            raise
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    for remark in _remarks(view, found, wanted, sources, follow):
        say(f"relax: {remark}", err=True)


def _chosen(records: Iterable[dict[str, Any]], wanted: LogFilter, sources: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the wanted records; add the roles and processes of all records to `sources`."""
    from relax_core.views.logs import source_of

    for record in records:
        sources |= {source_of(record), str(record.get("process") or source_of(record))}
        if record in wanted:
            yield record


def _print(records: Iterable[dict[str, Any]], as_json: bool) -> None:
    from relax_core.views.logs import readable_record

    for record in records:
        if as_json:
            print_json(record)
        else:
            say(readable_record(record))


def _remarks(view: RunView, found: RunLogs, wanted: LogFilter, sources: set[str], followed: bool) -> Iterator[str]:
    """Yield sentences about what is missing, damaged or still to come."""
    from relax_core.views.logs import is_over
    from relax_core.views.run import health

    state = health(view, time.time())
    over = is_over(state)
    if missing := sorted(set(wanted.roles) - sources):
        yield f"no record of {' and '.join(missing)}; there are records of {', '.join(sorted(sources)) or 'no role'}"
    if not found.has_processes():
        if over:
            yield f"{view.name} has no records of its processes, as runs of earlier versions of Relax; its events are shown"
        elif not sources:
            yield f"{view.name} has logged nothing yet; with --follow, this command waits for records"
    yield from found.problems(over)
    if outputs := found.outputs():
        yield f"plain output of processes: {view.path / 'logs'} ({', '.join(outputs)})"
    if state.state == "lost":
        yield f"{view.name}: {state.detail}"
    elif not over and not followed:
        yield f"{view.name} is {state.state}; --follow shows further records"
