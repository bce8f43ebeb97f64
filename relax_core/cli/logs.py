# SPDX-License-Identifier: Apache-2.0
"""The verb `relax logs`: the events of a run and the records of all its processes."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from json import loads
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.terminal import Address, Interrupted, Run, TokenFile, print_json, remote, say

if TYPE_CHECKING:
    from relax_core.control_api.client import ControlClient


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
    address: Address = "",
    token_file: TokenFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print each record as one line of JSON.")] = False,
) -> None:
    """Show what a run logged: its events and the records of all its processes, in order of time.

    Records are the log lines of Relax, of plugins and of libraries, and the plain output of engines, trainers, rewards
    and environments. Works on live, ended, killed and damaged runs. With --json, stdout has one JSON document a line.
    With --address, the newest 10,000 records so far are shown, of at most 32 MB.
    """
    from relax_core.views.logs import RunLogs, chosen, follow as followed, log_filter, remarks
    from relax_core.views.run import open_run

    said: Iterable[str] = ()
    try:
        if address:
            said = received = list[str]()
            query = {"role": role, "level": level, "since": since, "step": step, "last": last, "follow": int(follow)}
            _print(_from_address(remote(address, token_file, run), query, received), json)
        else:
            view, wanted = open_run(run), log_filter(role or (), level, since, step, time.time())
            found, sources = RunLogs(view.path), set[str]()
            said = remarks(view, found, wanted, sources, follow)  # yields nothing before the records are printed
            past = chosen(found.added(), wanted, sources)
            _print(past if last is None else deque(past, last), json)
            if follow:
                _print(chosen(followed(view, found), wanted, sources), json)
    except Interrupted:
        if not follow:
            raise
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    for remark in said:
        say(f"relax: {remark}", err=True)


def _print(records: Iterable[dict[str, Any]], as_json: bool) -> None:
    from relax_core.views.logs import readable_record

    for record in records:
        if as_json:
            print_json(record)
        else:
            say(readable_record(record))


def _from_address(client: ControlClient, query: Mapping[str, Any], said: list[str]) -> Iterator[dict[str, object]]:
    """Yield the records that a control API sends; append its remarks to `said`. Raises InfrastructureError if it ends early."""
    from relax_core.api.errors import ConfigError, InfrastructureError
    from relax_core.views.logs import REMARKS, parsed_record

    time = ""
    try:
        for line in client.lines("/logs", {name: value for name, value in query.items() if value not in (None, "")}):
            if (record := parsed_record(line)) is not None:
                time = str(record["time"])
                yield record
            elif (document := loads(line)).get("schema") == REMARKS:
                said += map(str, document["remarks"])
                return
    except ValueError as error:
        raise ConfigError("--address", client.address, "give the address of `relax serve`") from error
    later = f", with --since {time} for the records from the last one on" if time else ""
    raise InfrastructureError(f"{client.address} ended the log early; repeat the command{later}")
