# SPDX-License-Identifier: Apache-2.0
"""The command `relax engine serve`: an engine that joins a live run from outside."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from relax_core.api import ConfigError, SystemClock
from relax_core.cli.terminal import Arguments, remote, run_to_end, say, split
from relax_core.runs import ControlClient, read_token
from relax_plugin_scaling.engine_host import EngineHost, host_engine
from relax_plugin_scaling.joining import join_until_left

MAX_PORT = 65535
verbs = typer.Typer(no_args_is_help=True)


@verbs.callback()
def engine() -> None:
    """Serve an engine that joins a live run."""


@verbs.command()
def serve(
    arguments: Arguments,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token of the run's engines and of --join; default: the variable RELAX_TOKEN."),
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT at which the run calls this engine.")] = "127.0.0.1:8701",
    public: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of this engine as the run sees it, if it is not --listen.")
    ] = "",
    join: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Control API of the run, http://HOST:PORT or unix:PATH, to ask.")
    ] = "",
    patience_s: Annotated[
        float, typer.Option(help="Seconds without a run that takes this engine until the command fails.", min=0.0)
    ] = 600.0,
) -> None:
    """Serve the engine of a configuration to a live run on this machine or another one, until the run lets it go.

    The run calls the engine at an address that the run's configuration lists (placement.rollout.external), with the token
    of that table. The engine serves after it has proved the newest weights. With --join, this command asks the run, and asks
    again when the connection is lost; without it, use `relax scale RUN --join HOST:PORT`. The engine's model folder and
    options are those of this configuration. Nothing is encrypted: use loopback, a tunnel, or a closed network.
    """
    token, client = read_token(token_file), remote(join, token_file) if join else None
    where, _, port = listen.rpartition(":")
    if not where or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError("--listen", listen, "give HOST:PORT, such as 127.0.0.1:8701: a run calls its engines by TCP")
    host = host_engine(*split(arguments), token)
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    try:
        listener = socket.create_server((where.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise ConfigError("--listen", f"{listen} ({error})", "name a free port of this machine, or port 0") from error
    address = public or f"{where}:{listener.getsockname()[1]}"
    say(f"relax: an engine {host.description.engine} waits at {address}", err=True)
    run_to_end(_serve(host, listener, client, address, patience_s))


async def _serve(
    host: EngineHost, listener: socket.socket, client: ControlClient | None, address: str, patience_s: float
) -> None:
    await host.open(listener)
    try:
        await join_until_left(
            client, address, host.ends, SystemClock(), patience_s, lambda text: say(f"relax: {text}", err=True)
        )
    finally:
        await host.close()
