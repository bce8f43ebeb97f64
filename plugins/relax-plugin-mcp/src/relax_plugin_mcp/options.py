# SPDX-License-Identifier: Apache-2.0
"""Options of the environment `mcp`: servers, how to reach them, and the tools and results shown to the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from relax_core.api import Options
from relax_core.api.options import Secret

SecretOrText = Annotated[Secret | str, Field(union_mode="left_to_right")]


class ServerOptions(Options):
    """One server: a program that is called over its standard input and output, or an address."""

    name: str = Field(min_length=1)
    """Name of the server in messages and in the output of `relax train --dry-run`."""
    command: tuple[str, ...] = ()
    """The program with its arguments; `python` as the first word is the interpreter of the run."""
    url: str = Field("", pattern="^(https?://.+)?$")
    """Address of a running server (streamable HTTP), instead of a program."""
    per: Literal["sample", "worker"] = "sample"
    """`sample`: each sample gets its own program, or its own session at a `url`. `worker`: all samples of a process
    share one, so the tools must be stateless."""
    allow: tuple[str, ...] = ()
    """Tools that the policy may call, by the server's names; empty: all."""
    prefix: str = ""
    """Prefix of the names of the server's tools; needed if two servers have tools of the same name."""
    digest: str = ""
    """Expected digest of the server's tools, as `relax train --dry-run` prints it; with another digest the run is
    refused. Empty: any tools."""
    env: dict[str, SecretOrText] = {}
    """Further environment variables of the program; credentials as `"env:NAME"` or `"file:PATH"`. Of its worker's
    variables the program sees only `PATH`, `HOME`, `LANG`, `LC_ALL`, `TMPDIR`, `VIRTUAL_ENV` and `PYTHONPATH`."""
    directory: Path | None = None
    """Directory in which the program starts; None: the worker's directory."""
    headers: dict[str, SecretOrText] = {}
    """Further headers of requests to the address; credentials as `"env:NAME"` or `"file:PATH"`."""
    start_s: PositiveFloat = 30.0
    """Longest time in seconds until the server has listed its tools."""
    call_s: PositiveFloat = 30.0
    """Longest time of one call in seconds; after that the sample's outcome is `environment_error`."""
    result_bytes: PositiveInt = 16384
    """Most bytes of a result's text that the policy is shown."""

    @model_validator(mode="after")
    def _reached_one_way(self) -> ServerOptions:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"server {self.name!r}: set either command or url, and not both")
        if self.url and (self.env or self.directory):
            raise ValueError(f"server {self.name!r} has a url; remove env and directory, which belong to a command")
        if self.command and self.headers:
            raise ValueError(f"server {self.name!r} has a command; remove headers, which belong to a url")
        return self


class McpOptions(Options):
    """Options of `mcp`. The environment's `timeout_s` limits all calls of one turn together."""

    servers: tuple[ServerOptions, ...]
    """The servers, `[[environment.servers]]`."""
    images: bool = True
    """True: show the policy the images that tools return, which needs a vision model and `media = ["image"]`. False:
    replace each image with a line of text."""
    calls_per_turn: PositiveInt = 8
    """Most calls of one turn that are made; each further call gets an error text as its result."""

    @model_validator(mode="after")
    def _named_apart(self) -> McpOptions:
        if not self.servers:
            raise ValueError("no server: add a table [[environment.servers]]")
        names = [server.name for server in self.servers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two servers are named {twice[0]!r}; rename one")
        return self
